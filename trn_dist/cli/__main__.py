"""``python -m trn_dist.cli`` does what the console script ``trn`` does."""

from trn_dist.cli import main

main()
