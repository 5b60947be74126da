"""Policies by name: the pool's, its SSD tier's and the master's. One file a kind of idea; `base` and `cluster` say what a policy is."""

from umbp.policies import admission, cleaning, leaf_lru, lrfu, lru, placement, replication, routing, s3fifo, sieve, striping
from umbp.policies.base import (
    ADMISSION,
    CLEANING,
    EVICTION,
    STRIPING,
    AdmissionPolicy,
    EvictionPolicy,
    Inserted,
    Request,
    find,
    names,
    register,
)

__all__ = [
    "ADMISSION",
    "CLEANING",
    "EVICTION",
    "STRIPING",
    "AdmissionPolicy",
    "EvictionPolicy",
    "Inserted",
    "Request",
    "admission",
    "cleaning",
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
    "striping",
]
