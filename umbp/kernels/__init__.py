"""Triton kernels that move pages, one a file with its launcher; `reference` does the same in torch; only `aot` and kernels need Triton."""
