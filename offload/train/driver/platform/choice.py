"""Choose the platform of a run: a Ray cluster, or this machine."""

from __future__ import annotations

from offload.engine import uses_ray
from offload.train.driver.platform.platform import PlatformOpener
from offload.train.driver.run_arguments import Arguments


def platform_of(address: str | None, arguments: Arguments) -> PlatformOpener:
    """The platform on which a run with these arguments trains. This starts and writes nothing.

    Raises ConfigError for a wrong address, as :func:`offload.train.cluster.connection.check_address` does.
    """
    if uses_ray(address) or _needs_ray(arguments):
        from offload.train.driver.platform.ray_platform import OnRay  # it imports Ray

        return OnRay(address, leased=arguments.cluster.arbiter)
    from offload.train.driver.platform.this_machine import OnThisMachine

    return OnThisMachine()


def check_address(address: str | None) -> str | None:
    """The address of a Ray cluster, checked as :func:`offload.train.cluster.connection.check_address` does; None for this machine."""
    if not uses_ray(address):
        return None
    from offload.train.cluster import connection  # it imports Ray

    return connection.check_address(address)


def _needs_ray(arguments: Arguments) -> bool:
    """Return whether only Ray can do what a run asks for: read a Ray Dataset, serve Ray's metrics, make environments, add nodes,
    or choose among nodes."""
    scaling = arguments.scaling_config
    reserved = set(getattr(scaling, "resources_per_worker", None) or {})
    environment = getattr(arguments.run_config, "worker_runtime_env", None) or {}
    return (
        any(pipeline.dataset is not None for pipeline in arguments.datasets.values())
        or any(callback.ray_metrics_port is not None for callback in arguments.callbacks)
        or bool(environment.keys() - {"env_vars"})
        or arguments.cluster.autoscale_workers
        or bool(reserved - {"CPU", "GPU", "memory"})
        or bool(getattr(scaling, "accelerator_type", None) or getattr(scaling, "label_selector", None))
    )
