"""REST for operators: endpoints that validate, describe and guard themselves; the pool and the master define theirs with it."""
