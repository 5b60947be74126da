"""Policies by name: the pool's and the master's. One file a kind of idea; `base` and `cluster` say what a policy is."""

from umbp.policies import admission, leaf_lru, lrfu, lru, placement, replication, routing, s3fifo, sieve
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
    "placement",
    "register",
    "replication",
    "routing",
    "s3fifo",
    "sieve",
]
