"""Tiers: the DRAM segment in shared memory with its index (`segment`, `index`), and what a tier is (`base`)."""
