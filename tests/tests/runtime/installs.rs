//! What an engine installs on its layers, and what is refused.

use crate::{adapter, bits, matrix, runtime};
use lora_runtime::kernels::{Applied, LoraFfnWeights, LoraRows, LoraSite, Stream};
use lora_runtime::weights::{LoraModule, ModuleSet};
use lora_runtime::{
    AllReduced, FfnInstalled, InstallError, LayerLora, LoraMoeWeights, RuntimeOptions,
};

#[test]
fn deltas_that_do_not_fit_their_layer_are_refused_with_both_sides_named() {
    let dense = runtime("llama_plain", RuntimeOptions::new(1, 16));
    let mut layer = dense.layer(1).expect("layer 1");
    let error = layer
        .set_moe_lora_weights(LoraMoeWeights {
            layer: 1,
            ..Default::default()
        })
        .expect_err("dense");
    assert!(
        error.to_string().contains("expert") && error.to_string().contains("dense"),
        "{error}"
    );
    assert!(
        matches!(layer.ffn().installed(), FfnInstalled::Dense(_)),
        "what was installed stays"
    );
    assert_eq!(
        layer.set_out_proj_lora(LoraSite::default()),
        Err(InstallError::OutProj { layer: 1 })
    );
    let elsewhere = layer.set_ffn_lora_weights(LoraFfnWeights {
        layer: 0,
        ..Default::default()
    });
    assert_eq!(
        elsewhere,
        Err(InstallError::WrongLayer { layer: 1, found: 0 })
    );

    let moe = runtime("qwen3_moe_params", RuntimeOptions::new(1, 16));
    let mut layer = moe.layer(0).expect("layer 0");
    let error = layer
        .set_ffn_lora_weights(LoraFfnWeights::default())
        .expect_err("a mixture of experts");
    assert!(
        error.to_string().contains("dense") && error.to_string().contains("mixture of experts"),
        "{error}"
    );
    layer
        .set_moe_lora_weights(LoraMoeWeights::default())
        .expect("fits");
}

#[test]
fn site_with_nothing_installed_returns_without_a_launch() {
    let runtime = runtime("qwen3_5_linear_attn", RuntimeOptions::new(2, 16));
    let mut scratch = runtime.scratch(4).expect("fits");
    let mut batch = runtime.batch(4).expect("fits");
    runtime
        .route(&mut batch, Stream::OWN, &[0], 1)
        .expect("slots exist");
    let linear = (0..runtime.model().layers.len())
        .find_map(|layer| match runtime.layer(layer).expect("in the model") {
            LayerLora::LinearAttention(linear) => Some((layer, linear)),
            LayerLora::Attention(_) => None,
        })
        .expect("a Qwen3.5 has linear-attention layers");
    let (n_out, k_in) = LoraModule::OutProj
        .dims(runtime.model(), linear.0)
        .expect("has an output projection");
    let (x, mut out) = (matrix(&runtime, 1, k_in, 1), matrix(&runtime, 1, n_out, 2));
    let mut ctx = runtime.context(Stream::OWN, &mut scratch);
    let target = AllReduced::new(out.mat_mut(1, n_out, n_out).expect("fits"));
    // No adapter is active: there is no pair.
    let applied = linear.1.apply_lora_out_proj(
        &mut ctx,
        LoraRows::Active,
        x.mat(1, k_in, k_in).expect("fits"),
        target,
    );
    assert_eq!(applied.expect("nothing to do"), Applied::Empty);
}

#[test]
fn output_projection_of_linear_attention_takes_its_delta() {
    let mut options = RuntimeOptions::new(1, 16);
    options.pool.modules = ModuleSet::everything();
    let runtime = runtime("qwen3_5_linear_attn", options);
    runtime
        .load(&[adapter(&runtime, "qwen3_5_linear_attn")])
        .expect("loads");
    let layers =
        (0..runtime.model().layers.len()).map(|layer| runtime.layer(layer).expect("in the model"));
    let adapted = layers.into_iter().find_map(|layer| match layer {
        LayerLora::LinearAttention(linear) if linear.out_proj.pair.is_some() => Some(linear),
        _ => None,
    });
    let linear = adapted.expect("the case adapts an output projection");
    let pair = linear.out_proj.pair.expect("is adapted");
    let (n_out, k_in) = (pair.n_out as usize, pair.k_in as usize);
    let (x, mut out) = (matrix(&runtime, 2, k_in, 1), matrix(&runtime, 2, n_out, 2));
    let before = bits(&out, 2 * n_out);
    let mut scratch = runtime.scratch(2).expect("fits");
    let mut ctx = runtime.context(Stream::OWN, &mut scratch);
    let target = AllReduced::new(out.mat_mut(2, n_out, n_out).expect("fits"));
    let applied = linear.apply_lora_out_proj(
        &mut ctx,
        LoraRows::Active,
        x.mat(2, k_in, k_in).expect("fits"),
        target,
    );
    assert!(matches!(applied, Ok(Applied::Launched { .. })));
    assert_ne!(bits(&out, 2 * n_out), before);
    assert!(
        !linear.inputs.is_empty(),
        "the pool has room for the input projections"
    );
}
