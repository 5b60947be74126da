#!/usr/bin/env python3
"""`wait_signal`: what it costs to wait for counters that are there, and how long a number of vain looks lasts, which bounds a wait."""

from __future__ import annotations

import argparse

import torch
from bench_page_load import kernels, seconds
from harness import emit

from umbp.kernels.tables import signal_address

POLLS = 20_000


def main() -> None:
    argparse.ArgumentParser(description=f"{__doc__} Prints one JSON line a row.").parse_args()
    mover, ours = kernels()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    pad = torch.zeros(1024, dtype=torch.int64, device=device)
    for words in (1, 8):
        addresses = torch.tensor([signal_address(pad.data_ptr(), word) for word in range(words)], device=device)
        status = torch.zeros(words, dtype=torch.int32, device=device)
        here, never = torch.zeros(words, dtype=torch.int64, device=device), torch.ones(words, dtype=torch.int64, device=device)
        there = seconds(lambda a=addresses, w=here, s=status: ours.wait_signal(a, w, s, polls=POLLS), device)
        assert not status.any()

        def in_vain(a: torch.Tensor = addresses, w: torch.Tensor = never, s: torch.Tensor = status) -> None:
            s.zero_()  # who is lost is not waited for again
            ours.wait_signal(a, w, s, polls=POLLS)

        vain = seconds(in_vain, device)
        assert status.all()
        emit(
            bench="wait_signal",
            mover=mover,
            device=torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
            words=words,
            arrived_us=round(there * 1e6, 2),
            look_us=round((vain - there) / POLLS * 1e6, 4),
        )


if __name__ == "__main__":
    main()
