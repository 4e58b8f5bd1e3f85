//! The facade, driven as an engine drives it, on real adapters.

use half::bf16;
use lora_runtime::config::{BackendKind, ModelSpec, RuntimeConfig};
use lora_runtime::kernels::{
    Applied, DeviceBuffer, LaunchOptions, LoraFfnWeights, LoraRows, LoraSite, SiteKind, Skip,
    Stream,
};
use lora_runtime::weights::{
    BASE_ADAPTER_ID, BASE_SLOT, LoraModule, ModuleSet, Unloaded, WeightsError,
};
use lora_runtime::{
    Adapter, AllReduced, FfnInstalled, InstallError, LayerLora, LoraMoeWeights, LoraRuntime,
    ModuleOut, RuntimeError, RuntimeOptions,
};
use lora_tests::case_dir;

fn model(case: &str) -> ModelSpec {
    let text =
        std::fs::read_to_string(case_dir(case).join("config.json")).expect("config.json is there");
    ModelSpec::from_hf_config(&text).expect("a known family")
}

fn runtime(case: &str, options: RuntimeOptions) -> LoraRuntime {
    LoraRuntime::open(BackendKind::Host, model(case), options).expect("the host backend opens")
}

fn adapter(runtime: &LoraRuntime, case: &str) -> Adapter {
    runtime
        .adapter(case, &case_dir(case).join("adapter"))
        .expect("the adapter opens")
}

/// Four slots that may be rotated.
fn rotating() -> RuntimeOptions {
    let mut options = RuntimeOptions::new(4, 16);
    options.pool.policy.allow_rotation = true;
    options
}

/// A matrix on the device, values from a small deterministic sequence.
fn matrix(runtime: &LoraRuntime, rows: usize, cols: usize, seed: usize) -> DeviceBuffer {
    let value = |at: usize| bf16::from_f32((((at * 37 + seed * 11) % 64) as f32 - 31.5) / 32.0);
    let values: Vec<bf16> = (0..rows * cols).map(value).collect();
    runtime.buffer(&values).expect("memory")
}

fn bits(buffer: &DeviceBuffer, len: usize) -> Vec<u16> {
    buffer
        .download::<bf16>(0, len)
        .expect("reads back")
        .into_iter()
        .map(bf16::to_bits)
        .collect()
}

/// q of layer 0 for rows that make these requests: the bits of every row.
fn routed_q(runtime: &LoraRuntime, requests: &[i32]) -> Vec<Vec<u16>> {
    let rows = requests.len();
    let (x, mut out) = (matrix(runtime, rows, 32, 1), matrix(runtime, rows, 32, 2));
    let (mut batch, mut scratch) = (
        runtime.batch(64).expect("fits"),
        runtime.scratch(64).expect("fits"),
    );
    runtime
        .route(&mut batch, Stream::OWN, requests, rows)
        .expect("slots exist");
    let q = ModuleOut {
        module: LoraModule::QProj,
        out: out.mat_mut(rows, 32, 32).expect("fits"),
    };
    let mut ctx = runtime.context(Stream::OWN, &mut scratch);
    let applied = runtime
        .apply(&mut ctx, &batch, 0, x.mat(rows, 32, 32).expect("fits"), [q])
        .expect("launches");
    assert!(matches!(applied, Applied::Launched { .. }));
    bits(&out, rows * 32)
        .chunks(32)
        .map(<[u16]>::to_vec)
        .collect()
}

#[test]
fn each_row_of_a_mixed_batch_gets_the_bits_that_it_gets_alone() {
    let runtime = runtime("llama_plain", rotating());
    let adapters =
        ["llama_plain", "llama_rslora", "llama_patterns"].map(|case| adapter(&runtime, case));
    runtime.load(&adapters).expect("loads");
    let requests = [0, 1, BASE_SLOT, 2, 0, -1, 1];
    let mixed = routed_q(&runtime, &requests);
    for (row, request) in requests.into_iter().enumerate() {
        // The same row at the same place, everything around it the base model.
        let mut alone = [BASE_SLOT; 7];
        alone[row] = request;
        assert_eq!(routed_q(&runtime, &alone)[row], mixed[row], "row {row}");
    }
    let base = routed_q(&runtime, &[BASE_SLOT; 7]);
    assert_eq!(mixed[2], base[2]);
    assert_ne!(mixed[0], base[0]);
}

#[test]
fn pair_and_route_give_the_same_bits_and_routes_survive_a_rotation() {
    let runtime = runtime("llama_plain", rotating());
    runtime
        .load(&["llama_plain", "llama_rslora"].map(|case| adapter(&runtime, case)))
        .expect("loads");
    let site = |runtime: &LoraRuntime| match runtime.layer(0).expect("layer 0") {
        LayerLora::Attention(layer) => layer.attention.q,
        LayerLora::LinearAttention(_) => panic!("a Llama has attention layers"),
    };
    let before = site(&runtime);
    let apply_pair = |site: LoraSite| {
        let (x, mut out) = (matrix(&runtime, 3, 32, 1), matrix(&runtime, 3, 32, 2));
        let mut scratch = runtime.scratch(8).expect("fits");
        let mut ctx = runtime.context(Stream::OWN, &mut scratch);
        let (x, target) = (
            x.mat(3, 32, 32).expect("fits"),
            out.mat_mut(3, 32, 32).expect("fits"),
        );
        let _ = site
            .apply(&mut ctx, SiteKind::Attention, LoraRows::Active, x, target)
            .expect("launches");
        bits(&out, 3 * 32)
    };
    assert_eq!(apply_pair(before), routed_q(&runtime, &[0; 3]).concat());
    assert_eq!(runtime.rotate(1).expect("permitted"), Some(0));
    let after = site(&runtime);
    assert_ne!(after.pair, before.pair);
    assert_eq!(after.route, before.route);
    assert_eq!(apply_pair(after), routed_q(&runtime, &[1; 3]).concat());
}

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

#[test]
fn projection_that_the_layer_lacks_is_an_error_and_one_that_the_pool_lacks_is_passed_over() {
    let mut options = RuntimeOptions::new(1, 16);
    options.pool.modules = ModuleSet::default().without(LoraModule::OProj);
    let runtime = runtime("llama_plain", options);
    let mut scratch = runtime.scratch(1).expect("fits");
    let mut batch = runtime.batch(1).expect("fits");
    runtime
        .route(&mut batch, Stream::OWN, &[BASE_SLOT], 1)
        .expect("the base model is no slot");
    let x = matrix(&runtime, 1, 32, 1);
    let mut out = matrix(&runtime, 1, 32, 2);
    let mut apply = |module, layer| {
        let mut ctx = runtime.context(Stream::OWN, &mut scratch);
        let site = ModuleOut {
            module,
            out: out.mat_mut(1, 32, 32).expect("fits"),
        };
        runtime.apply(
            &mut ctx,
            &batch,
            layer,
            x.mat(1, 32, 32).expect("fits"),
            [site],
        )
    };
    assert!(matches!(apply(LoraModule::OProj, 0), Ok(Applied::Empty)));
    let error = apply(LoraModule::OutProj, 0).expect_err("a Llama has no linear attention");
    assert!(
        error.to_string().contains("linear_attn.out_proj"),
        "{error}"
    );
    assert!(matches!(
        apply(LoraModule::QProj, 9),
        Err(RuntimeError::NoSuchSite {
            layer: 9,
            layers: 2,
            ..
        })
    ));
}

#[test]
fn levers_leave_deltas_out() {
    for (launch, skipped) in [
        (
            LaunchOptions {
                no_apply: true,
                ..Default::default()
            },
            Some(Skip::NoApply),
        ),
        (
            LaunchOptions {
                no_ffn: true,
                ..Default::default()
            },
            None,
        ),
    ] {
        let runtime = runtime(
            "llama_plain",
            RuntimeOptions {
                launch,
                ..RuntimeOptions::new(1, 16)
            },
        );
        runtime
            .load(&[adapter(&runtime, "llama_plain")])
            .expect("loads");
        let (x, mut out) = (matrix(&runtime, 1, 32, 1), matrix(&runtime, 1, 32, 2));
        let (mut batch, mut scratch) = (
            runtime.batch(1).expect("fits"),
            runtime.scratch(1).expect("fits"),
        );
        runtime
            .route(&mut batch, Stream::OWN, &[0], 1)
            .expect("slot 0 exists");
        let q = ModuleOut {
            module: LoraModule::QProj,
            out: out.mat_mut(1, 32, 32).expect("fits"),
        };
        let mut ctx = runtime.context(Stream::OWN, &mut scratch);
        let applied = runtime
            .apply(&mut ctx, &batch, 0, x.mat(1, 32, 32).expect("fits"), [q])
            .expect("launches");
        assert_eq!(
            matches!(applied, Applied::Skipped(found) if Some(found) == skipped),
            skipped.is_some()
        );
    }
}

#[test]
fn promotion_evicts_and_every_verb_is_counted() {
    let runtime = runtime("llama_plain", RuntimeOptions::new(2, 16));
    runtime
        .load(&[adapter(&runtime, "llama_plain")])
        .expect("loads");
    assert_eq!(
        runtime
            .promote(&adapter(&runtime, "llama_rslora"))
            .expect("a cache slot is free")
            .slot(),
        1
    );
    let refused = runtime
        .promote(&adapter(&runtime, "bad_nan"))
        .expect_err("holds a NaN");
    assert!(
        matches!(
            &refused,
            RuntimeError::Weights(WeightsError::Refused { .. })
        ),
        "{refused}"
    );
    let evicting = runtime
        .promote(&adapter(&runtime, "llama_patterns"))
        .expect("the other one is idle");
    assert_eq!(
        (evicting.slot(), runtime.weights().slot_of("llama_rslora")),
        (1, None)
    );
    let held = runtime.lease(1).expect("slot 1 is filled");
    assert!(
        runtime.promote(&adapter(&runtime, "llama_rslora")).is_err(),
        "the only cache slot is held"
    );
    assert_eq!(held.adapter_id(), runtime.adapter_id(1));
    drop(held);
    assert!(matches!(runtime.unload(1), Ok(Unloaded::Freed(_))));
    let metrics = runtime.metrics();
    assert_eq!(
        (
            metrics.loads,
            metrics.promotions,
            metrics.evictions,
            metrics.unloads
        ),
        (3, 2, 1, 1)
    );
    assert_eq!(metrics.refusals, 2);
    assert_eq!(metrics.refusal_reasons.get("non-finite-weights"), Some(&1));
    assert!(metrics.bytes >= 3 * runtime.report().pool.slot);
}

#[test]
fn rotation_waits_for_the_old_active_slot_and_needs_permission() {
    let runtime = runtime("llama_plain", rotating());
    runtime
        .load(&["llama_plain", "llama_rslora"].map(|case| adapter(&runtime, case)))
        .expect("loads");
    let held = runtime.lease(-1).expect("slot 0 is active");
    assert!(matches!(
        runtime.rotate(1),
        Err(RuntimeError::Weights(WeightsError::SlotBusy {
            slot: 0,
            ..
        }))
    ));
    drop(held);
    runtime.rotate(1).expect("nobody holds slot 0");
    assert_eq!(runtime.metrics().rotations, 1);
    let fixed = self::runtime("llama_plain", RuntimeOptions::new(2, 16));
    fixed
        .load(&["llama_plain", "llama_rslora"].map(|case| adapter(&fixed, case)))
        .expect("loads");
    assert!(matches!(
        fixed.rotate(1),
        Err(RuntimeError::Weights(
            WeightsError::RotationNotPermitted { .. }
        ))
    ));
}

#[test]
fn swap_changes_the_identity_of_the_slot_and_nothing_else() {
    let runtime = runtime("llama_plain", rotating());
    runtime
        .load(&["llama_plain", "llama_rslora"].map(|case| adapter(&runtime, case)))
        .expect("loads");
    let (first, second) = (runtime.adapter_id(0), runtime.adapter_id(1));
    let other_rows = routed_q(&runtime, &[1; 2]);
    runtime
        .swap(0, &adapter(&runtime, "llama_plain"))
        .expect("the same adapter again, as an RL step does");
    assert_ne!(runtime.adapter_id(0), first);
    assert_eq!(runtime.adapter_id(1), second);
    assert_eq!(runtime.adapter_id(BASE_SLOT), BASE_ADAPTER_ID);
    assert_eq!(routed_q(&runtime, &[1; 2]), other_rows);
    assert_eq!(runtime.metrics().swaps, 1);
}

#[test]
fn lora_toml_sets_up_a_whole_runtime() {
    let path = |case: &str| case_dir(case).join("adapter").display().to_string();
    let text = format!(
        "max_loras = 3\nmax_rank = 8\n[levers]\nrotate = true\n\
         [[adapters]]\nname = \"plain\"\npath = {:?}\n[[adapters]]\nname = \"rs\"\npath = {:?}\npinned = false\n",
        path("llama_plain"),
        path("llama_rslora"),
    );
    let config = RuntimeConfig::from_toml(&text).expect("valid");
    let runtime = LoraRuntime::from_config(&config, model("llama_plain")).expect("sets up");
    let report = runtime.report();
    let residents: Vec<(u32, &str, bool)> = report
        .adapters
        .iter()
        .map(|adapter| (adapter.slot, adapter.name.as_str(), adapter.pinned))
        .collect();
    assert_eq!(residents, [(0, "plain", true), (1, "rs", false)]);
    assert_eq!(
        (
            report.active,
            report.adapters[0].dense_pairs,
            report.adapters[0].applied
        ),
        (Some(0), 14, 28)
    );
    runtime.rotate(1).expect("the lever permits it");
}

#[test]
fn adapter_that_cannot_be_opened_is_named() {
    let runtime = runtime("llama_plain", RuntimeOptions::new(1, 16));
    let missing = runtime
        .adapter("gone", std::path::Path::new("/no/such/folder"))
        .expect_err("is not there");
    assert!(
        missing.to_string().contains("gone") && missing.to_string().contains("/no/such/folder"),
        "{missing}"
    );
    let refused = runtime
        .adapter("zero", &case_dir("bad_r_zero").join("adapter"))
        .expect_err("rank 0");
    assert!(
        refused.to_string().contains("zero") && refused.to_string().contains("config-r"),
        "{refused}"
    );
}
