"""What holds for every test."""

import signal

# Started in the background by a shell without job control, this process ignores SIGINT, and so would every process that
# a test starts and then interrupts. A handler of our own becomes the default again in those.
signal.signal(signal.SIGINT, signal.default_int_handler)
