"""What holds for every test."""

import os
import signal
import tempfile

from hypothesis import settings

from tests.examples import examples

# No test fails because the machine is busy, so no example has a deadline.
settings.register_profile("quire", max_examples=examples(100), deadline=None)
settings.load_profile("quire")

# Services that tests start do not record into the folder of whoever runs the tests, unless a test says where.
os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp(prefix="quire-tests-"))

# Started in the background by a shell without job control, this process ignores SIGINT, and so would every process that
# a test starts and then interrupts. A handler of our own becomes the default again in those.
signal.signal(signal.SIGINT, signal.default_int_handler)
