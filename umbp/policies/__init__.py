"""Policies by name: eviction, admission. One file a kind of idea; `base` says what a policy is."""

from umbp.policies import admission, leaf_lru, lrfu, lru, s3fifo, sieve
from umbp.policies.base import ADMISSION, EVICTION, AdmissionPolicy, EvictionPolicy, Inserted, Request, find, names, register

__all__ = [
    "ADMISSION",
    "EVICTION",
    "AdmissionPolicy",
    "EvictionPolicy",
    "Inserted",
    "Request",
    "admission",
    "find",
    "leaf_lru",
    "lrfu",
    "lru",
    "names",
    "register",
    "s3fifo",
    "sieve",
]
