"""The core in a seeded world: workloads, faults, cost models, replay."""
