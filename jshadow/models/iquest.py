"""IQuest-Coder-V1 (IQuest Lab, "IQuest-Coder-V1 Technical Report"): Llama with 80 layers."""

from jshadow.models.family import ModelFamily
from jshadow.models.llama import RULES

IQUEST_CODER = ModelFamily(
    model_type="iquestcoder",
    architecture="LlamaForCausalLM",
    models="IQuest-Coder-V1-40B",
    rules=RULES,
    differs="as `llama`",
    defaults={
        "vocab_size": 76800,
        "num_hidden_layers": 80,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
    },
)
