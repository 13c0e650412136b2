"""Accelerators that are only described: their compilers make programs for them, which cannot run here."""

from typing import Any

from jax.experimental import topologies

TPUS = {"v5e": "v5e:2x2", "v4": "v4:2x2x1", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""TPUs, with topologies of at least four devices."""

# Compute capability; shared memory per block and per multiprocessor in bytes; multiprocessors; bytes of L2 cache and
# of memory; memory bandwidth. CUDA C++ Programming Guide, "Compute Capabilities"; NVIDIA's data sheets.
_GPUS = {
    "H100": ((9, 0), 232_448, 233_472, 132, 50 << 20, 80 << 30, 3_350_000_000_000),
    "A100": ((8, 0), 166_912, 167_936, 108, 40 << 20, 80 << 30, 2_039_000_000_000),
    "L4": ((8, 9), 101_376, 102_400, 58, 48 << 20, 24 << 30, 300_000_000_000),
}
GPUS = tuple(_GPUS)
"""GPUs. Older ones, such as the T4 (compute capability 7.5), are not described."""


def platform_of(device: str) -> str:
    """Returns `tpu` or `gpu`, JAX's name for the backend of a device in `TPUS` or `GPUS`."""
    return "tpu" if device in TPUS else "gpu"


def devices(device: str, count: int) -> list[Any]:
    """Returns several devices of a kind, up to four, in one process."""
    if device in TPUS:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=TPUS[device]).devices)[:count]
    topology = topologies.get_topology_desc(platform="cuda", target_config=_described(device), topology=f"1x1x{count}")
    return list(topology.devices)


def _described(device: str) -> str:
    (major, minor), of_block, of_processor, processors, cache, memory, bandwidth = _GPUS[device]
    return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
      shared_memory_per_block: 49152 shared_memory_per_block_optin: {of_block} shared_memory_per_core: {of_processor}
      core_count: {processors} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: 1.5 device_memory_size: {memory}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 8 }}
    device_description_str: "{device}"
    """
