//! Landing plans, carried out by hand: what an engine that brings the bytes itself ends up with.

mod common;

use common::{Adapter, Geometry, SlotBytes, World, assert_serves, moe_model, pool, tiny_model};
use lora_config::{AdapterConfig, ModelSpec, ParseOptions, parse_peft_adapter_config};
use lora_weights::device::DevicePtr;
use lora_weights::{
    AdapterAb, AdapterStore, LandPlace, LandRequest, LandTarget, LandingInput, MemoryTensor,
    PackSource, PoolLayout, PoolSpec, SlotTarget, TensorDtype, TensorId, WeightManifest,
    WeightsError, audit_adapter, build_land_targets, image_bytes, pack_adapter, padded_rank,
    rebuild_slot_layers,
};
use safetensors::tensor::TensorView;

/// The file that a store's tensors make.
fn file_of(store: &AdapterStore) -> Vec<u8> {
    let dtype = |dtype| match dtype {
        TensorDtype::F32 => safetensors::Dtype::F32,
        _ => safetensors::Dtype::BF16,
    };
    let views = store.tensors().iter().enumerate().map(|(at, meta)| {
        let bytes = store.tensor_bytes(TensorId(at));
        let view = TensorView::new(dtype(meta.dtype), meta.shape.clone(), bytes).unwrap();
        (meta.name.clone(), view)
    });
    safetensors::serialize(views, None).unwrap()
}

fn manifest(file: &[u8]) -> WeightManifest {
    WeightManifest::parse(file, file.len() as u64).unwrap()
}

/// A slot at 0x1000, and its units right behind it in descending order.
struct Device {
    bytes: Vec<u8>,
    units: Vec<DevicePtr>,
}

const SLOT: DevicePtr = DevicePtr(0x1000);

impl Device {
    fn new(layout: &PoolLayout, units: u64) -> Self {
        let bytes = layout.bytes();
        let unit = |n: u64| SLOT.offset(bytes.slot + n * bytes.expert_unit);
        Self {
            bytes: vec![0; (bytes.slot + units * bytes.expert_unit) as usize],
            units: (0..units).rev().map(unit).collect(),
        }
    }

    fn place(&self) -> LandPlace<'_> {
        LandPlace {
            slot: SLOT,
            units: &self.units,
        }
    }

    fn land(&mut self, file: &[u8], targets: &[LandTarget]) {
        for target in targets {
            for row in 0..target.rows {
                let from = (target.src_offset + row * target.src_stride) as usize;
                let to = (target.dst.0 - SLOT.0 + row * target.dst_stride) as usize;
                let bytes = target.row_bytes as usize;
                self.bytes[to..to + bytes].copy_from_slice(&file[from..from + bytes]);
            }
        }
    }
}

/// What packing makes of the same adapter, its units in the device's order.
fn packed(
    store: &AdapterStore,
    config: &AdapterConfig,
    model: &ModelSpec,
    spec: &PoolSpec,
) -> Vec<u8> {
    let report = audit_adapter(store, config, model, spec);
    assert!(report.ok(), "{:?}", report.findings);
    let layout = PoolLayout::new(model, spec).unwrap();
    let mut image = vec![0u64; image_bytes(&layout, &report.pairs).unwrap().div_ceil(8)];
    let pairs = &report.pairs;
    pack_adapter(
        PackSource { store, pairs },
        &layout,
        bytemuck::cast_slice_mut(&mut image),
    )
    .unwrap();
    let mut image: Vec<u8> = bytemuck::cast_slice(&image).to_vec();
    image.truncate(image_bytes(&layout, pairs).unwrap());
    let slot = layout.bytes().slot as usize;
    let units: Vec<Vec<u8>> = match layout.bytes().expert_unit as usize {
        0 => Vec::new(),
        unit => image[slot..].chunks(unit).map(<[u8]>::to_vec).collect(),
    };
    image.truncate(slot);
    image.extend(units.into_iter().rev().flatten());
    image
}

#[test]
fn landed_bytes_are_those_that_packing_gives() {
    for (model, rank, experts) in [
        (moe_model(), 4, vec![0, 2]),
        (moe_model(), 3, vec![1]),
        (tiny_model(), 16, vec![]),
    ] {
        let spec = PoolSpec {
            max_rank: 40,
            ..pool(2)
        };
        let mut geometry = Geometry::dense(&model, rank);
        if !experts.is_empty() {
            geometry = geometry.with_experts(&experts);
        }
        let adapter = Adapter::new("a", &geometry, 1.0);
        let file = file_of(&adapter.store);
        let layout = PoolLayout::new(&model, &spec).unwrap();
        let units = 2 * (experts.len() as u64 * 3 + u64::from(!experts.is_empty()));
        let mut device = Device::new(&layout, units);
        let request = LandRequest {
            name: "a",
            weights: &manifest(&file),
            config: &adapter.config,
            model: &model,
            pool: &spec,
        };
        let targets = build_land_targets(request, device.place()).unwrap();
        device.land(&file, &targets);
        assert!(device.bytes == packed(&adapter.store, &adapter.config, &model, &spec));
        for target in &targets {
            assert!(
                target.ab == AdapterAb::B || target.rows == 1,
                "A is contiguous"
            );
            assert!(
                target.ab == AdapterAb::A || target.dst_stride % 32 == 0,
                "B is at the padded rank"
            );
        }

        let pairs = rebuild_slot_layers(&targets, &adapter.config, model.layers.len()).unwrap();
        let report = audit_adapter(&adapter.store, &adapter.config, &model, &spec);
        let dense = pairs
            .layers
            .iter()
            .map(|layer| layer.pairs().count())
            .sum::<usize>();
        let in_units = pairs
            .experts
            .iter()
            .map(|layer| layer.pairs().count() + usize::from(layer.router().is_some()));
        assert_eq!(dense + in_units.sum::<usize>(), report.pairs.len());
        let (module, pair) = pairs.layers[1].pairs().next().unwrap();
        let (_, region) = layout.region(1, module).unwrap();
        assert_eq!(
            (pair.a, pair.b),
            (SLOT.offset(region.a_offset), SLOT.offset(region.b_offset))
        );
        assert_eq!(
            (pair.rank, pair.scale, pair.max_rank),
            (rank as u32, 2.0, padded_rank(rank as u32))
        );
        assert_eq!((pair.k_in, pair.n_out), (region.k_in, region.n_out));
        if let Some(router) = pairs.experts[0].router() {
            // The first pair of the first layer has the first unit that was given.
            let first = report
                .pairs
                .iter()
                .find(|pair| !pair.target.is_dense())
                .unwrap();
            assert_eq!(first.layer, 0);
            assert!(device.units.contains(&router.a));
        }
    }
}

/// A stacked adapter of two experts on `down_proj` of a one-layer model, BF16.
fn stacked(order: &str) -> (AdapterStore, AdapterConfig, ModelSpec) {
    let model = ModelSpec::from_hf_config(
        r#"{"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 48, "num_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": 12, "decoder_sparse_step": 1, "head_dim": 8}"#,
    )
    .unwrap();
    let json = format!(
        r#"{{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": false, "target_modules": [],
            "target_parameters": ["mlp.experts.down_proj"], "lora_B_layout": "{order}"}}"#
    );
    let path = "base_model.model.model.layers.0.mlp.experts";
    let values = |count: usize| -> Vec<half::bf16> {
        (0..count).map(|i| half::bf16::from_f32(i as f32)).collect()
    };
    let store = AdapterStore::from_tensors(
        &*json,
        [
            MemoryTensor::from_bf16(format!("{path}.lora_A.weight"), [4, 12], &values(48)),
            MemoryTensor::from_bf16(format!("{path}.lora_B.weight"), [32, 4], &values(128)),
        ],
    )
    .unwrap();
    let config = parse_peft_adapter_config(&json, &ParseOptions::default()).unwrap();
    (store, config, model)
}

#[test]
fn a_stack_lands_where_its_rows_are_runs_and_is_refused_where_they_are_not() {
    let spec = pool(2);
    for (order, lands) in [("grouped_by_expert", true), ("rank_major", false)] {
        let (store, config, model) = stacked(order);
        let file = file_of(&store);
        let layout = PoolLayout::new(&model, &spec).unwrap();
        let mut device = Device::new(&layout, 2);
        let request = LandRequest {
            name: "stack",
            weights: &manifest(&file),
            config: &config,
            model: &model,
            pool: &spec,
        };
        match build_land_targets(request, device.place()) {
            Ok(targets) => {
                assert!(lands, "{order}");
                device.land(&file, &targets);
                assert!(device.bytes == packed(&store, &config, &model, &spec));
            }
            Err(WeightsError::Refused { report, .. }) => {
                assert!(!lands, "{order}: {:?}", report.findings);
                let error = report.errors().next().unwrap();
                assert_eq!(error.reason, "landing-geometry");
                assert!(
                    error.tensor.as_deref().unwrap().ends_with("lora_B.weight"),
                    "{error}"
                );
                assert_eq!(report.errors().count(), 1, "one finding a tensor");
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn what_has_to_be_converted_or_does_not_load_is_refused_with_the_audits_reasons() {
    let model = tiny_model();
    let name = "base_model.model.model.layers.0.self_attn.o_proj";
    let json = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": false, "target_modules": ["o_proj"]}"#;
    let config = parse_peft_adapter_config(json, &ParseOptions::default()).unwrap();
    let tensors = [
        MemoryTensor::from_f32(format!("{name}.lora_A.weight"), [4, 32], &[1.0; 128]),
        MemoryTensor::from_f32(format!("{name}.lora_B.weight"), [32, 4], &[1.0; 128]),
    ];
    let store = AdapterStore::from_tensors(json, tensors).unwrap();
    let file = file_of(&store);
    let reasons = |spec: &PoolSpec| -> Vec<String> {
        let request = LandRequest {
            name: "a",
            weights: &manifest(&file),
            config: &config,
            model: &model,
            pool: spec,
        };
        let place = LandPlace {
            slot: SLOT,
            units: &[],
        };
        match build_land_targets(request, place) {
            Err(WeightsError::Refused { report, .. }) => {
                report.errors().map(|f| f.reason.clone()).collect()
            }
            other => panic!("{other:?}"),
        }
    };
    let missing = "unmatched-target";
    assert_eq!(
        reasons(&PoolSpec::new(1, 2)),
        ["rank-exceeds-pool", missing]
    );
    let mut partial = PoolSpec::new(1, 8);
    partial.policy.allow_partial_targets = true;
    assert_eq!(reasons(&partial), ["landing-geometry", "landing-geometry"]);
}

#[test]
fn targets_that_are_not_the_configs_are_not_rebuilt() {
    let model = tiny_model();
    let spec = PoolSpec::new(1, 8);
    let adapter = Adapter::new("a", &Geometry::dense(&model, 4), 1.0);
    let other = Adapter::new("b", &Geometry::dense(&model, 2), 1.0);
    let file = file_of(&adapter.store);
    let request = LandRequest {
        name: "a",
        weights: &manifest(&file),
        config: &adapter.config,
        model: &model,
        pool: &spec,
    };
    let place = LandPlace {
        slot: SLOT,
        units: &[],
    };
    let targets = build_land_targets(request, place).unwrap();
    let what = |targets: &[LandTarget], config: &AdapterConfig, layers| match rebuild_slot_layers(
        targets, config, layers,
    ) {
        Err(WeightsError::LandingGeometry {
            what,
            found,
            expected,
            ..
        }) => (what, found, expected),
        other => panic!("{other:?}"),
    };
    assert_eq!(what(&targets, &other.config, 2), ("rank", 4, 2));
    assert_eq!(what(&targets, &adapter.config, 1), ("layer", 1, 1));
    assert_eq!(what(&targets[1..], &adapter.config, 2), ("matrices", 1, 2));
    let twice = [&targets[..2], &targets[..1]].concat();
    assert_eq!(what(&twice, &adapter.config, 2), ("matrices", 3, 2));
    let two_a = [targets[0].clone(), targets[0].clone()];
    assert_eq!(what(&two_a, &adapter.config, 2), ("matrices", 1, 2));
}

#[test]
fn experts_need_a_unit_each() {
    let model = moe_model();
    let spec = pool(2);
    let adapter = Adapter::new("a", &Geometry::dense(&model, 4).with_experts(&[0]), 1.0);
    let file = file_of(&adapter.store);
    let request = LandRequest {
        name: "a",
        weights: &manifest(&file),
        config: &adapter.config,
        model: &model,
        pool: &spec,
    };
    let units = [DevicePtr(0x9000); 7];
    let place = LandPlace {
        slot: SLOT,
        units: &units,
    };
    assert!(matches!(
        build_land_targets(request, place),
        Err(WeightsError::ExpertRegionFull {
            needed: 8,
            free: 7,
            ..
        })
    ));
}

/// Brings `file` to the targets in pieces of `bytes`, the last first.
fn in_pieces(file: &[u8], targets: &[LandTarget], image: &mut [u8], bytes: usize) {
    let pieces: Vec<_> = file.chunks(bytes).enumerate().collect();
    for (at, piece) in pieces.into_iter().rev() {
        for target in targets {
            target.copy_piece((at * bytes) as u64, piece, image);
        }
    }
}

#[test]
fn landed_bytes_go_through_the_transaction_of_every_adapter_however_they_come() {
    let World(memory, weights, _, fresh) = &World::new();
    let file = file_of(&fresh.store);
    let manifest = manifest(&file);
    let input = LandingInput::new("d", &manifest, &fresh.config);
    for bytes in [1, 7, 64, 1 << 20] {
        let staged = weights.stage_landed(&input, |targets, image| {
            in_pieces(&file, targets, image, bytes);
            Ok(())
        });
        let staged = staged.unwrap();
        let mut findings = staged.report().findings.iter();
        assert!(staged.report().values_read);
        assert!(findings.all(|finding| finding.reason != "values-unread"));
        weights
            .pack_store_into_slot(SlotTarget::Slot(1), staged)
            .unwrap();
        assert_serves(weights, memory, 1, fresh);
    }
}

#[test]
fn a_landing_that_fails_or_brings_a_nan_touches_no_slot_and_leaks_nothing() {
    let World(memory, weights, resident, fresh) = &World::new();
    let file = file_of(&fresh.store);
    let manifest = manifest(&file);
    let input = LandingInput::new("d", &manifest, &fresh.config);
    let before = (
        SlotBytes::read_all(weights, memory),
        memory.totals().used,
        weights.expert_units(),
    );
    let same = || {
        let now = (
            SlotBytes::read_all(weights, memory),
            memory.totals().used,
            weights.expert_units(),
        );
        assert!(now == before);
        assert!(memory.totals().staging_buffers <= 1);
        assert_serves(weights, memory, 1, &resident[1]);
    };
    let dies = weights.stage_landed(&input, |targets, image| {
        in_pieces(&file[..file.len() / 2], targets, image, 64);
        Err("the peer is gone".into())
    });
    let error = dies.unwrap_err();
    assert!(
        matches!(&error, WeightsError::Landing { adapter, .. } if adapter == "d"),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .ends_with("no slot was touched: the peer is gone")
    );
    same();

    let last = TensorId(manifest.tensors().len() - 1);
    let mut bad = file.clone();
    let at = manifest.range(last).start as usize + 2 * 5;
    bad[at..at + 2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    let refused = weights.stage_landed(&input, |targets, image| {
        in_pieces(&bad, targets, image, 64);
        Ok(())
    });
    let WeightsError::Refused { report, .. } = refused.unwrap_err() else {
        panic!("a NaN");
    };
    let error = report.errors().next().unwrap();
    assert_eq!(
        (error.reason.as_str(), error.tensor.as_deref()),
        (
            "non-finite-weights",
            Some(&*manifest.tensors()[last.0].name)
        )
    );
    assert!(error.message.starts_with("value 5 "), "{error}");
    same();

    let zero = weights.stage_landed(&input, |_, _| Ok(())).unwrap();
    let warned: Vec<_> = zero
        .report()
        .warnings()
        .map(|finding| finding.reason.as_str())
        .collect();
    assert!(
        warned.contains(&"no-effect"),
        "nothing was landed: {warned:?}"
    );
}
