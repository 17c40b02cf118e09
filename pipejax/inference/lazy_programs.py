"""Keeps a T5's parameters as read from disk until they are needed on devices."""

import dataclasses
import logging
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pipejax.config import Config
from pipejax.decoding.drafters import TargetModel
from pipejax.inference import backends, drafter_parameters
from pipejax.inference.backends import Backend
from pipejax.inference.drafter_parameters import OpenDrafter
from pipejax.inference.programs import Programs
from pipejax.model import lora
from pipejax.model.precision import compute_dtype
from pipejax.system import Tree

logger = logging.getLogger(__name__)


class LazyPrograms:
    """Parameters that become `Programs` on first use. Threads may share it.

    Laying out weights takes seconds and may compile a kernel, so it is postponed until the input has been checked. The
    parameters are released once the programs exist.
    """

    def __init__(
        self,
        config: Config,
        params: Tree,
        devices: Sequence[jax.Device],
        backend: Backend | None,
        drafter: OpenDrafter | None = None,
    ) -> None:
        """Opens the drafter of `decode.draft` and its parameters, if it has some; runs nothing on a device.

        Args:
          config: the config with the architecture.
          params: the parameters.
          devices: the devices that decode a batch each.
          backend: lays out the weights; None: the fastest.
          drafter: the opened drafter; None: the drafter of `decode.draft` is opened.
        """
        self.size = sum(x.size for x in jax.tree.leaves(params))
        self.drafter = drafter or drafter_parameters.load(TargetModel(config))
        self._config, self._devices, self._backend = config, devices, backend
        self._params = params
        self._made: Programs | None = None
        self._lock = threading.Lock()

    @property
    def programs(self) -> Programs:
        """The weights on the devices, and the programs compiled for them; created at the first access."""
        with self._lock:
            self._made = self._made or self._prepare()
            return self._made

    def _prepare(self) -> Programs:
        """Chooses the backend, and lays out the weights and the drafter's parameters."""
        config, dtype = self._config, dtype_of(self._config)
        assert config.model is not None
        if lora.is_stacked(self._params):
            logger.info(
                "adapters: decoding computes layer by layer, because the fast decoders "
                "support only the weights of the base model"
            )
            backend = Backend(config.decode.weights)
        else:
            backend = backends.choose(self._backend, config.model, dtype, config.decode.weights)
        made = Programs(config.model, dtype, devices=self._devices, backend=backend)
        own = None
        if self.drafter:
            own = drafter_parameters.lay_out(self.drafter, made, config.decode.weights)
            self.drafter = dataclasses.replace(self.drafter, params=None)
        made.set_params(self._params, own)
        self._params = None
        return made


def dtype_of(config: Config) -> jnp.dtype:
    """Returns the dtype in which decoding computes."""
    return compute_dtype("float32" if config.decode.weights == "float32" else config.decode.dtype)
