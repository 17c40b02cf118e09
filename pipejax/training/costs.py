"""Peak floating-point throughput of accelerators, the reference for a training step's utilisation (MFU)."""

import jax

# Dense bfloat16 operations per second, from the vendors' data sheets. For a device that is not listed, no utilisation
# is reported.
PEAKS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,  # the SXM variant
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "TPU v6 lite": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v4": 275e12,
}


def peak(device: jax.Device) -> float | None:
    """Returns the bfloat16 operations per second of one device, or None for an unknown device."""
    if "H100" in device.device_kind and "HBM3" not in device.device_kind:  # the PCIe variant is slower
        return None
    names = [name for name in PEAKS if device.device_kind.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None
