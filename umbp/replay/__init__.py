"""A trace driven through a running pool by engine processes that verify every byte they read."""
