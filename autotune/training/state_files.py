"""Where a training's state and weights are, without torch: the driver looks for states of paused
trials, and reads none.
"""

import shutil
from pathlib import Path

WEIGHTS_FILE = "weights.safetensors"
STATE_FILE = "state.pt"


def is_kept(folder: Path) -> bool:
    """Whether a folder holds a saved training state."""
    return (folder / STATE_FILE).is_file()


def has_room(folder: Path) -> bool:
    """Whether the disk of a folder has room for another saved state, beside those in the folders
    within it.

    Room is what the largest of those takes, twice since a state is replaced by a new file, and some
    megabytes for all other files.
    """
    try:
        largest = max((path.stat().st_size for path in folder.glob(f"*/{STATE_FILE}")), default=0)
        return shutil.disk_usage(folder).free >= 2 * largest + 8 * 2**20
    except OSError:  # a state was deleted meanwhile, or the folder is another machine's
        return True
