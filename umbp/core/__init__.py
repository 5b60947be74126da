"""PURE: every decision of the pool (space, leases, reservations, eviction) as plain synchronous code. No clock, randomness or I/O."""
