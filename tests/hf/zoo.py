"""A tiny random model of every family under test: `build("llama")`.

The models predict nothing, but each exercises its family's cache: grouped queries, windows and
chunks shorter than the text, shared layers, latents, experts, recurrent states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

Kind = Literal["decoder", "recurrent", "hybrid", "encoder-decoder"]

VOCABULARY = 128
WINDOW = 8  # also the chunk size, and the number of tokens an indexed query selects

# These compute attention themselves, with operations on keys and values: two until 5.24.
OWN_ATTENTION: tuple[str, ...] = ("xglm", "bloom", "mpt", "gpt_neo")
if Version(transformers.__version__) < Version("5.24"):
    OWN_ATTENTION += ("gptj", "codegen")

HEAD_DIM = 16
# t5 and gpt_neo fold the scaling of scores into their weights.
UNSCALED = ("Attention.q.weight", "attn.attention.q_proj.weight")

# Each configuration uses the values that it declares, under its own names.
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, eq=False)
class Family:
    """A recurrent family has no attention layer; in a hybrid some layers also have a state."""

    name: str
    kind: Kind
    model: str
    options: Mapping[str, Any]

    @property
    def cache_argument(self) -> str:
        return "cache_params" if self.kind == "recurrent" else "past_key_values"

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return getattr(transformers, self.model)

    def config(self, **changes: Any) -> PreTrainedConfig:
        config_class = self.model_class.config_class
        declared = {field.name for field in fields(config_class)}
        common = {
            config_class.attribute_map.get(name, name): value for name, value in COMMON.items()
        }
        common = {name: value for name, value in common.items() if name in declared}
        return config_class(**common | dict(self.options) | changes)

    def build(self, **changes: Any) -> PreTrainedModel:
        """Build the model with fixed weights. `changes` are options of the configuration."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            model = self.model_class(self.config(**changes)).eval()
            for name, parameter in model.named_parameters():
                randomize(name, parameter)
        # A random model may end its text at any token, so the end token is disabled.
        model.generation_config.eos_token_id = None
        model.generation_config.forced_eos_token_id = None
        return model

    def inputs(self, sequences: int = 1, tokens: int = 20, seed: int = 0) -> dict[str, Tensor]:
        """Return arguments of `forward` with this many decoder tokens, none of them special."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, VOCABULARY, (2, sequences, tokens), generator=generator)
        if self.kind != "encoder-decoder":
            return {"input_ids": ids[0]}
        if self.name != "whisper":
            return {"input_ids": ids[0], "decoder_input_ids": ids[1]}
        sound = torch.randn(sequences, *WHISPER_INPUT, generator=generator)
        return {"input_features": sound, "decoder_input_ids": ids[1]}


def randomize(name: str, parameter: Tensor) -> None:
    """Set large weights, so that queries see few tokens, and centre them, so that few tokens look
    alike.

    Without centring, the common part of activations would dominate the output of many models.
    """
    if name.endswith("sinks"):
        parameter.normal_()
    elif parameter.dim() > 1 and not name.endswith("A_log"):
        parameter.normal_(std=min(0.25, 2 / parameter.shape[-1] ** 0.5))
        for dim in (0, 1) if parameter.dim() == 2 else ():
            parameter.sub_(parameter.mean(dim, keepdim=True))
    if name.endswith(UNSCALED):
        parameter.div_(HEAD_DIM**0.5)
    if name.endswith("encoder_attn.q_proj.weight"):
        parameter.div_(2)  # for bart: a normalized sum quadruples rounding errors


FAMILIES: dict[str, Family] = {}


# No key/value layer belongs to kvant: states, and layers that only transformers understands.
NO_ROWS = ("mamba", "falcon_mamba", "mamba2", "deepseek_v32")


def valid_spec(name: str, spec: str) -> str:
    """Return the spec valid for a family: formats are refused if no layer has rows."""
    return "raw" if name in NO_ROWS else spec


def build(name: str, **changes: Any) -> PreTrainedModel:
    return FAMILIES[name].build(**changes)


def family_names(*kinds: Kind) -> list[str]:
    """Return the families of these kinds, or all of them."""
    return [name for name, family in FAMILIES.items() if not kinds or family.kind in kinds]


def _add(family_kind: Kind, name: str, model: str, **options: Any) -> None:
    FAMILIES[name] = Family(name, family_kind, model, options)


decoder = partial(_add, "decoder")
recurrent = partial(_add, "recurrent")
hybrid = partial(_add, "hybrid")
encoder_decoder = partial(_add, "encoder-decoder")

# Full attention.
decoder("llama", "LlamaForCausalLM")
decoder("qwen2", "Qwen2ForCausalLM")
decoder("qwen3", "Qwen3ForCausalLM", head_dim=32)
decoder("phi3", "Phi3ForCausalLM")
decoder("olmo2", "Olmo2ForCausalLM")
decoder("smollm3", "SmolLM3ForCausalLM")
decoder("granite", "GraniteForCausalLM", attention_multiplier=0.25)
decoder("cohere", "CohereForCausalLM")
decoder("glm4", "Glm4ForCausalLM")
decoder("stablelm", "StableLmForCausalLM")
decoder("phi", "PhiForCausalLM")
decoder("persimmon", "PersimmonForCausalLM")
decoder("gpt2", "GPT2LMHeadModel")
decoder("gpt_neox", "GPTNeoXForCausalLM")
decoder("gpt_bigcode", "GPTBigCodeForCausalLM")
decoder("opt", "OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=64)
decoder("biogpt", "BioGptForCausalLM")
decoder("xglm", "XGLMForCausalLM", ffn_dim=96)
decoder("falcon", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2)
decoder("bloom", "BloomForCausalLM")
decoder("mpt", "MptForCausalLM", max_seq_len=512, use_cache=True)
decoder("gptj", "GPTJForCausalLM", rotary_dim=8)
decoder("codegen", "CodeGenForCausalLM", rotary_dim=8)
decoder(
    "gpt_neo", "GPTNeoForCausalLM", attention_types=[[["global", "local"], 2]], window_size=WINDOW
)
# These change keys or values after the cache returns them.
decoder("diffllama", "DiffLlamaForCausalLM")
decoder("doge", "DogeForCausalLM")
decoder("jetmoe", "JetMoeForCausalLM", num_local_experts=4)

# One layer would read an image: for a text it has no rows.
decoder("mllama", "MllamaForCausalLM", cross_attention_layers=[1], pad_token_id=0)

# Windows and chunks.
decoder("mistral", "MistralForCausalLM", sliding_window=WINDOW)
decoder("starcoder2", "Starcoder2ForCausalLM", sliding_window=WINDOW)
decoder("gemma2", "Gemma2ForCausalLM", sliding_window=WINDOW, query_pre_attn_scalar=16)
decoder(
    "gemma3",
    "Gemma3ForCausalLM",
    sliding_window=WINDOW,
    query_pre_attn_scalar=16,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
)
decoder("olmo3", "Olmo3ForCausalLM", sliding_window=WINDOW)
decoder("cohere2", "Cohere2ForCausalLM", sliding_window=WINDOW)
decoder(
    "gpt_oss",
    "GptOssForCausalLM",
    sliding_window=WINDOW,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
)
decoder(
    "llama4",
    "Llama4ForCausalLM",
    attention_chunk_size=WINDOW,
    num_local_experts=2,
    intermediate_size_mlp=96,
)
# The last two layers read the rows of the first two.
shared = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
decoder(
    "gemma3n", "Gemma3nForCausalLM", laurel_rank=8, activation_sparsity_pattern=[0.0] * 4, **shared
)
decoder("gemma4", "Gemma4ForCausalLM", global_head_dim=32, **shared)

# Experts.
experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
decoder("mixtral", "MixtralForCausalLM", num_local_experts=4)
decoder("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=4, **experts)

# Latents.
latent = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
deepseek = {**latent, **experts, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
decoder("minicpm3", "MiniCPM3ForCausalLM", **latent)
decoder("deepseek_v2", "DeepseekV2ForCausalLM", **deepseek)
decoder("deepseek_v3", "DeepseekV3ForCausalLM", first_k_dense_replace=1, **deepseek)
decoder("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **deepseek)
decoder(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    first_k_dense_replace=1,
    index_topk=WINDOW,
    index_head_dim=16,
    index_n_heads=16,  # with few heads scores are often all 0, and the selected tokens random
    **deepseek,
)

# States, alone and next to attention. Two families clamp the time step of all but decoded tokens;
# here it is so small that this changes nothing.
mamba = {"mamba_n_groups": 1, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
delta = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
recurrent("mamba", "MambaForCausalLM")
recurrent("falcon_mamba", "FalconMambaForCausalLM")
recurrent("mamba2", "Mamba2ForCausalLM", state_size=16, num_heads=8, n_groups=2, chunk_size=8)
hybrid(
    "jamba",
    "JambaForCausalLM",
    attn_layer_period=2,
    attn_layer_offset=1,
    num_experts=2,
    num_experts_per_tok=1,
    mamba_d_state=8,
    mamba_dt_rank=8,
)
# Without explicit positions, each call of bamba counts them from 0.
hybrid("bamba", "BambaForCausalLM", attn_layer_indices=[1, 3], mamba_n_heads=8, **mamba)
hybrid("falcon_h1", "FalconH1ForCausalLM", mamba_d_ssm=64, mamba_n_heads=4, **mamba)
hybrid(
    "nemotron_h",
    "NemotronHForCausalLM",
    layers_block_type=["mamba", "attention"] * 2,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=16,
    chunk_size=8,
    time_step_min=1e-6,
)
hybrid(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    layer_types=["mamba", "attention"] * 2,
    mamba_n_heads=8,
    num_local_experts=2,
    num_experts_per_tok=1,
    shared_intermediate_size=64,
    **mamba,
)
hybrid("zamba", "ZambaForCausalLM", num_key_value_heads=4, attention_head_dim=32)
hybrid(
    "zamba2",
    "Zamba2ForCausalLM",
    layers_block_type=["mamba", "hybrid"] * 2,
    num_key_value_heads=4,
    use_mem_rope=True,
    adapter_rank=8,
    mamba_d_state=16,
    chunk_size=8,
    time_step_min=1e-6,
)
hybrid(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    num_experts=4,
    shared_expert_intermediate_size=32,
    **experts,
    **delta,
)
# Each layer's keys and values depend on a state.
hybrid(
    "zaya",
    "ZayaForCausalLM",
    layer_types=["hybrid", "hybrid_sliding"] * 2,
    sliding_window=WINDOW,
    num_experts=4,
    moe_intermediate_size=32,
    router_hidden_size=16,
)
hybrid("qwen3_5", "Qwen3_5ForCausalLM", **delta)
hybrid("lfm2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"] * 2)

# In t5 the decoder is deeper than the encoder, whose depth the configuration uses for both.
WHISPER_INPUT = (8, 32)  # bands, frames
sides = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
}
encoder_decoder(
    "t5",
    "T5ForConditionalGeneration",
    num_layers=2,
    num_decoder_layers=3,
    d_kv=HEAD_DIM,
    d_ff=96,
    decoder_start_token_id=2,
)
encoder_decoder("bart", "BartForConditionalGeneration", **sides)
encoder_decoder(
    "whisper",
    "WhisperForConditionalGeneration",
    num_mel_bins=WHISPER_INPUT[0],
    max_source_positions=WHISPER_INPUT[1] // 2,
    max_target_positions=512,
    begin_suppress_tokens=None,
    **sides,
)

NAMES = family_names()
