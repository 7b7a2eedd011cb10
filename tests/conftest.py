"""What holds for all tests."""

import signal

# A shell without job control starts `make test &` with SIGINT ignored, and so would be every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
