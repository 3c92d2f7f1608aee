"""The quickstart without asynchrony: an update waits for its answers, and generation for the update.

    areal-train --config=configs/quickstart_sync.py --workdir=runs/quickstart_sync
    areal-report --compare runs/quickstart runs/quickstart_sync

One report beside the other says what asynchrony bought.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(pathlib.Path(__file__).parent / 'quickstart.py'))
    config.staleness.eta = 0.0
    return config
