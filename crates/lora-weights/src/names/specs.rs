//! Small models for unit tests.

use lora_config::{
    AttentionKind, FfnKind, GateUpOrder, LayerSpec, LinearAttentionSpec, LinearInputs, ModelFamily,
    ModelSpec, MoeSpec, StackedAxes,
};

const DENSE: LayerSpec = LayerSpec {
    attention: AttentionKind::Full,
    ffn: FfnKind::Dense { width: 40 },
};

/// Two dense layers, hidden 32, 4 heads of 8, 2 KV heads, FFN 40, vocabulary 48.
pub(crate) fn llama() -> ModelSpec {
    ModelSpec {
        family: ModelFamily::Llama,
        hidden_size: 32,
        layers: vec![DENSE; 2],
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        gated_attention: false,
        fused_projections: false,
        vocab_size: 48,
        tied_embeddings: false,
        hidden_act: "silu".to_owned(),
        moe: None,
        linear_attention: None,
    }
}

/// Llama's sizes with q, k, v in one projection and gate, up in another.
pub(crate) fn phi3() -> ModelSpec {
    ModelSpec {
        family: ModelFamily::Phi3,
        fused_projections: true,
        ..llama()
    }
}

/// Layer 0 dense, layer 1 with 3 experts of width 12 and a shared one of width 20.
pub(crate) fn qwen3_moe() -> ModelSpec {
    let mut spec = llama();
    spec.family = ModelFamily::Qwen2Moe;
    spec.layers[1].ffn = FfnKind::Moe;
    spec.moe = Some(MoeSpec {
        num_experts: 3,
        top_k: 2,
        norm_topk_prob: false,
        shared_expert_gate: true,
        expert_width: 12,
        shared_expert_width: Some(20),
        stacked_axes: StackedAxes::OutIn,
        gate_up: GateUpOrder::Concatenated,
        is_transposed: false,
        block_name: "mlp",
        router_name: "gate",
    });
    spec
}

/// All layers MoE, stored `[E, in, out]`, gate and up interleaved, router called `router`.
pub(crate) fn gpt_oss() -> ModelSpec {
    let mut spec = qwen3_moe();
    spec.family = ModelFamily::GptOss;
    spec.layers[0].ffn = FfnKind::Moe;
    let moe = spec.moe.as_mut().unwrap();
    moe.shared_expert_width = None;
    moe.stacked_axes = StackedAxes::InOut;
    moe.gate_up = GateUpOrder::Interleaved;
    moe.is_transposed = true;
    moe.router_name = "router";
    spec
}

/// Layer 0 dense, layer 1 MoE with a shared expert, under `feed_forward`.
pub(crate) fn llama4() -> ModelSpec {
    let mut spec = qwen3_moe();
    spec.family = ModelFamily::Llama4;
    let moe = spec.moe.as_mut().unwrap();
    moe.stacked_axes = StackedAxes::InOut;
    moe.shared_expert_gate = false;
    moe.block_name = "feed_forward";
    moe.router_name = "router";
    spec
}

/// Layer 0 linear attention (2 key heads of 8, 4 value heads of 6), layer 1 gated full attention, FFNs dense.
pub(crate) fn qwen3_5() -> ModelSpec {
    let mut spec = llama();
    spec.family = ModelFamily::Qwen35;
    spec.gated_attention = true;
    spec.layers[0].attention = AttentionKind::Linear;
    spec.linear_attention = Some(LinearAttentionSpec {
        key_heads: 2,
        value_heads: 4,
        key_head_dim: 8,
        value_head_dim: 6,
        inputs: LinearInputs::Split,
    });
    spec
}

/// Qwen3.5's layers with joined projections.
pub(crate) fn qwen3_next() -> ModelSpec {
    let mut spec = qwen3_5();
    spec.family = ModelFamily::Qwen3Next;
    if let Some(linear) = &mut spec.linear_attention {
        linear.inputs = LinearInputs::Fused;
    }
    spec
}
