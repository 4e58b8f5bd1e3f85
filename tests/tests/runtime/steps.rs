//! A step: which adapter each row takes, and what its bits depend on.

use crate::{adapter, bits, matrix, rotating, routed_q, runtime};
use lora_runtime::kernels::{Applied, LaunchOptions, LoraRows, LoraSite, SiteKind, Skip, Stream};
use lora_runtime::weights::{BASE_SLOT, LoraModule, ModuleSet};
use lora_runtime::{LayerLora, LoraRuntime, ModuleOut, RuntimeError, RuntimeOptions};

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
        site.apply(&mut ctx, SiteKind::Attention, LoraRows::Active, x, target)
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
