#!/usr/bin/env python3
"""`turn_gates`: what it costs to change the tags of 1 and of 8 gates and to look at what was there, with the host's look at it."""

from __future__ import annotations

import argparse

import torch
from bench_page_load import kernels, seconds
from harness import emit

from umbp.kernels.tables import CHANNEL_BYTES, signal_address


def main() -> None:
    argparse.ArgumentParser(description=f"{__doc__} Prints one JSON line a row.").parse_args()
    mover, ours = kernels()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    pad = torch.zeros(8 * CHANNEL_BYTES // 8, dtype=torch.int64, device=device)
    for words in (1, 8):
        channels = torch.tensor([signal_address(pad.data_ptr(), word) for word in range(words)], device=device)
        seen, change = torch.zeros((words, 3), dtype=torch.int64, device=device), torch.zeros(words, dtype=torch.int64, device=device)

        def turn(c: torch.Tensor = channels, s: torch.Tensor = seen, add: torch.Tensor = change) -> None:
            ours.turn_gates(c, add, s)
            s.cpu()

        name = torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu"
        emit(bench="turn_gates", mover=mover, device=name, words=words, us=round(seconds(turn, device) * 1e6, 2))


if __name__ == "__main__":
    main()
