"""Bytes between nodes: what a transport is (`base`), HTTP streams (`http`, `sending`), and NIXL where it is installed (`nixl`)."""
