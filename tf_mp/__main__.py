"""`python -m tf_mp` equals `tf-mp`."""

import sys

from tf_mp.cli import main

if __name__ == "__main__":
    sys.exit(main())
