"""The defaults: a tiny random model on token reversal. Experiment files start from here."""

from ml_collections import config_dict

from areal_jax import config


def get_config() -> config_dict.ConfigDict:
    return config.default_config()
