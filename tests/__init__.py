"""The tests, and what has to be so before any of them imports torch."""

import os

# Two test processes on two cores: a thread of torch's that spins until the others are done keeps one of those from
# its core meanwhile. Sleeping, they do the same work in half the time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
