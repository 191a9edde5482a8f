"""LoRA adapters of PEFT: their files, and their products in the forwards of a model.

folder of PEFT ──lora_config──► LoraConfig ──┐
               ──safetensors──► tensors  ────┴─load──► Adapter ──AdapterSwitch.use──► forward
"""

from kvant.adapters.adapter import Adapter
from kvant.adapters.load import check_adapters, find_adapter, load_adapter, load_adapters
from kvant.adapters.switch import AdapterSwitch

__all__ = [
    "Adapter",
    "AdapterSwitch",
    "check_adapters",
    "find_adapter",
    "load_adapter",
    "load_adapters",
]
