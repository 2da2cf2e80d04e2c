"""The one place where TensorFlow is imported: without its log lines and without any accelerator, both of which belong to JAX.

clu's writers and TFDS import TensorFlow themselves (about three seconds): call `import_tensorflow` before importing them.
"""

import os
from types import ModuleType


def import_tensorflow() -> ModuleType:
    """TensorFlow, quiet and blind to accelerators. Calling it again costs nothing."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # only silences a notice: nothing is computed with TensorFlow here
    import tensorflow as tf

    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf
