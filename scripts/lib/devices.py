"""Where a run trains: on one device, on several, or in several processes.

    devices = devices_for(4)                    # 4 GPUs, or 4 logical CPUs without a GPU
    devices = devices_for(distributed=True)     # this process's part of a larger whole (JAX)
    run(settings, "outputs/vgg", devices=devices)

The work is Keras's own: `tf.distribute.MirroredStrategy` and `keras.distribution.DataParallel`. All
that a run asks of them is here, so that it reads the same for one device.
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import ops

import tfp_ibnn as ibnn
from lib import checks
from lib.folder import RunError

_VARIABLES = ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
_VARIABLES = tuple(f"KERAS_DISTRIBUTION_{name}" for name in _VARIABLES)


class Devices:
    """One device: what a run does without further ado. The base of the other ways."""

    count = 1  # of devices, those of other processes included
    shard = (0, 1)  # the share of every batch that this process feeds: its index, and how many
    jit_compile: bool | str = "auto"  # whether to compile steps by XLA; "auto" leaves it to Keras
    identity = {}  # what of this belongs to a run's identity, because its results depend on it

    @property
    def is_first(self):
        return self.shard[0] == 0

    def check_batch(self, size):
        if size % self.count:
            wrong = f"A batch of {size} does not divide among {self.count} devices"
            raise RunError(f"{wrong}: choose another `batch_size`.")

    # Contexts in which a model is made and compiled, and fitted, and, also within the latter, for
    # models of one device.
    building = training = alone = staticmethod(contextlib.nullcontext)

    def on_one(self, model):
        """Return the model on one device: a copy if it is on several, else the model itself."""
        if type(self) is Devices:
            return model
        with self.alone(), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            model.save(path)
            return keras.saving.load_model(path)

    def update(self, copy, model):
        """Give what `on_one` has returned the weights that the model has now."""
        if copy is not model:
            copy.set_weights(model.get_weights())

    def from_first(self, compute):
        """Return, in all processes, what the first one computes, or raise its error; for JSON."""
        return compute()

    def restore(self, checkpoint, model):
        """Load the first process's checkpoint; return the number of epochs that are done."""
        return checkpoint.restore(model)

    def leave(self):
        """End the work in common, when all processes have come to its end."""

    def abort(self, code):
        """Return an exit status; if other processes wait for this one, end it now instead."""
        return code


class _Mirrored(Devices):
    """Several devices under TensorFlow's MirroredStrategy.

    Each replica draws its own noise, and batch normalization has its share of the batch: other than
    on JAX, their number changes what comes out, and a run begun on two must resume on two.
    """

    def __init__(self, count):
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            (cpu,) = tf.config.list_physical_devices("CPU")
            parts = [tf.config.LogicalDeviceConfiguration()] * count
            # TensorFlow that has started already keeps the devices it has.
            with contextlib.suppress(RuntimeError):
                tf.config.set_logical_device_configuration(cpu, parts)
        kind = "GPU" if gpus else "CPU"
        _check_there(count, len(tf.config.list_logical_devices(kind)), kind)
        self.count, self.identity = count, {"replicas": count}
        self._strategy = tf.distribute.MirroredStrategy([f"{kind}:{i}" for i in range(count)])
        self.building = self._strategy.scope


class _Parallel(Devices):
    """Several devices, or several processes, under Keras's DataParallel on JAX.

    JAX computes one global batch, however it is divided: a run may resume with another number.
    """

    def __init__(self, count, distributed=False):
        import jax

        if count is not None:
            # Where there are GPUs, the CPUs stay unused. JAX that has started keeps what it has.
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", count)
        if distributed:
            try:
                keras.distribution.initialize()
            except RuntimeError as error:
                raise ValueError(f"The other processes cannot be reached: {error}") from error
            self.shard = jax.process_index(), jax.process_count()
        here = jax.local_devices()
        count = len(here) if count is None else count
        _check_there(count, len(here), here[0].platform.upper())
        # In the order of the processes, so that their shares make up the batch in its order.
        each = [jax.local_devices(process)[:count] for process in range(jax.process_count())]
        devices = sum(each, [])
        self.count, self._several = len(devices), self.shard[1] > 1
        parallel = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
        self.building = parallel.scope

    @contextlib.contextmanager
    def training(self):
        from jax.errors import JaxRuntimeError

        try:
            with self.building():
                yield
        except (JaxRuntimeError, ValueError) as error:
            # Of CPUs that gather data the error is a plain one, which names their library.
            lost = isinstance(error, JaxRuntimeError) or "Gloo" in str(error)
            if not (self._several and lost):
                raise
            raise RunError(
                "Training in common has broken off, most likely because another process has ended: "
                "see its output. Started again, all resume from the last checkpoint."
            ) from error

    @contextlib.contextmanager
    def alone(self):
        before = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            yield
        finally:
            keras.distribution.set_distribution(before)

    def from_first(self, compute):
        if not self._several:
            return compute()
        outcome = None
        if self.is_first:
            try:
                outcome = None, compute()
            except (RunError, ibnn.training.CheckpointError, OSError) as error:
                outcome = str(error), None
        text = json.dumps(outcome).encode()
        # All must give arrays of one size, so the size goes ahead.
        size = int(self._broadcast(np.array(len(text))))
        content = np.frombuffer(text, "uint8") if self.is_first else np.zeros(size, "uint8")
        message, value = json.loads(bytes(np.asarray(self._broadcast(content))))
        if message is not None:
            raise RunError(message)
        return value

    def restore(self, checkpoint, model):
        if not self._several:
            return checkpoint.restore(model)
        saved = []

        def read():
            done, pairs = checkpoint.read(model)
            saved.extend(value for _, value in pairs)
            return done

        # Only all processes together can assign to a variable, so the first may not do it there.
        if done := self.from_first(read):
            variables = [*model.variables, *model.optimizer.variables]
            values = [ops.convert_to_numpy(variable.value) for variable in variables]
            if self.is_first:
                values = [new.astype(old.dtype) for new, old in zip(saved, values, strict=True)]
            for variable, value in zip(variables, self._broadcast(values), strict=True):
                variable.assign(value)
        return done

    def leave(self):
        if self._several:
            import jax

            # Else the others would wait for the first, which has yet to test, and not forever.
            jax.distributed.shutdown()

    def abort(self, code):
        if not self._several:
            return code
        # JAX would wait here until all processes leave, but they wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _broadcast(self, tree):
        from jax.experimental import multihost_utils

        return multihost_utils.broadcast_one_to_all(tree)


def devices_for(count=None, distributed=False):
    """Return the devices to train on; call this before anything else is done with the backend.

    `count` is the number of GPUs or, where there is none, of logical CPUs, in this process; None is
    one, or all there are if `distributed`: together with other processes, which Keras's environment
    variables name (JAX only).
    """
    if count is not None:
        count = checks.KINDS["count"]("devices", count)
    if distributed:
        _check_environment()
        return _Parallel(count, distributed)
    if count in (None, 1):
        return Devices()
    return (_Mirrored if keras.backend.backend() == "tensorflow" else _Parallel)(count)


def accelerators():
    """Return the names of the GPUs and TPUs in use."""
    if keras.backend.backend() == "jax":
        import jax

        return [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU") + tf.config.list_physical_devices("TPU")
    details = tf.config.experimental.get_device_details
    return [details(device).get("device_name", device.device_type) for device in found]


def _check_there(wanted, there, kind):
    if wanted > there:
        found = f"{keras.backend.backend()} has {there} {kind} device{'s'[: there != 1]} here"
        raise ValueError(f"`devices` is {wanted}, but {found}: ask for no more than that.")


def _check_environment():
    if keras.backend.backend() != "jax":
        why = "Keras 3 does not train by TensorFlow's strategies for many machines"
        raise ValueError(f"`distributed` training takes JAX ({why}): set the backend to jax.")
    if missing := [name for name in _VARIABLES if not os.environ.get(name)]:
        names = f"the environment variable{'s'[: len(missing) > 1]} {', '.join(missing)}"
        hold = "the address of the first process, such as 10.0.0.1:1234, the number of processes"
        raise ValueError(f"`distributed` training needs {names}: {hold}, and this one's number.")
    number, index = (os.environ[name] for name in _VARIABLES[1:])
    if not (number.isdecimal() and index.isdecimal() and int(index) < int(number)):
        must = f"{_VARIABLES[2]} must be a number from 0 on, below {_VARIABLES[1]}"
        raise ValueError(f"{must}; got {index!r} and {number!r}.")
