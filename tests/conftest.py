"""What holds for all tests."""

import signal

# A shell without job control starts `make test &` with SIGINT ignored, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
