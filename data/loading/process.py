"""A loader process: it ends with the rank that it reads for, and only with that."""

import os

from data.parent import die_with_parent


def begin_worker(_number: int, *, parent: int) -> None:
    """Bind a new loader process to the rank `parent`; torch looks after that every five seconds.

    In a process group of its own: a launcher signals a rank's whole group, and the rank needs its
    loader to finish the step and save.
    """
    os.setpgrp()
    die_with_parent(parent)
