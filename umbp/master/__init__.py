"""The master: who has which page, who serves it fastest, where the next one goes; alone, or embedded in a pool."""
