//! Packing against a naive picture of a slot.

mod common;

use common::{Adapter, Geometry, moe_model, tiny_model};
use half::{bf16, f16};
use lora_config::ModelSpec;
use lora_weights::{
    AdapterStore, AuditReport, AuditedPair, ExpertPoolSpec, LoraTarget, MemoryTensor, PackSource,
    PairSource, PoolLayout, PoolSpec, TensorDtype, TensorId, WeightsError, audit_adapter,
    image_bytes, pack_adapter, packed_stride,
};
use proptest::prelude::*;

fn pool(max_rank: u32, expert_rank: u32) -> PoolSpec {
    PoolSpec {
        experts: Some(ExpertPoolSpec {
            max_rank: expert_rank,
            units: 64,
        }),
        ..PoolSpec::new(2, max_rank)
    }
}

/// An image whose every byte was something else before.
fn pack(store: &AdapterStore, pairs: &[AuditedPair], layout: &PoolLayout) -> Vec<bf16> {
    let elements = image_bytes(layout, pairs).unwrap() / 2;
    let mut image = vec![bf16::NAN; elements + 3];
    pack_adapter(
        PackSource { store, pairs },
        layout,
        bytemuck::cast_slice_mut(&mut image),
    )
    .unwrap();
    assert!(
        image[elements..].iter().all(|v| v.is_nan()),
        "wrote past the image"
    );
    image.truncate(elements);
    image
}

/// The same image, one element at a time.
fn naive(store: &AdapterStore, pairs: &[AuditedPair], layout: &PoolLayout) -> Vec<bf16> {
    let mut image = vec![bf16::ZERO; image_bytes(layout, pairs).unwrap() / 2];
    let slot = layout.bytes().slot as usize / 2;
    let unit = layout.bytes().expert_unit as usize / 2;
    let mut ordered: Vec<_> = pairs.iter().collect();
    ordered.sort_by_key(|pair| (pair.layer, pair.target));
    let mut units = 0;
    for pair in ordered {
        let rank = pair.rank as usize;
        let stride = rank.next_multiple_of(16);
        let (a, b) = match pair.target {
            LoraTarget::Attn(module) => {
                let (_, region) = layout.region(pair.layer, module).unwrap();
                let at = |offset: u64| offset as usize / 2;
                (at(region.a_offset), at(region.b_offset))
            }
            _ => {
                let room = layout.experts().unwrap().max_rank() as usize;
                let a = slot + units * unit;
                units += 1;
                (a, a + room * pair.k_in)
            }
        };
        let PairSource::Whole {
            a: from_a,
            b: from_b,
        } = pair.source
        else {
            panic!("whole tensors only");
        };
        for k in 0..rank {
            for i in 0..pair.k_in {
                image[a + k * pair.k_in + i] = value(store, from_a, k * pair.k_in + i);
            }
            for o in 0..pair.n_out {
                image[b + o * stride + k] = value(store, from_b, o * rank + k);
            }
        }
    }
    image
}

fn value(store: &AdapterStore, id: TensorId, at: usize) -> bf16 {
    let bytes = store.tensor_bytes(id);
    match store.tensor(id).dtype {
        TensorDtype::Bf16 => bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]),
        TensorDtype::F16 => {
            bf16::from_f32(f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32())
        }
        TensorDtype::F32 => bf16::from_f32(f32::from_le_bytes(
            bytes[4 * at..4 * at + 4].try_into().unwrap(),
        )),
        other => panic!("{other}"),
    }
}

fn audit(adapter: &Adapter, model: &ModelSpec, pool: &PoolSpec) -> AuditReport {
    audit_adapter(&adapter.store, &adapter.config, model, pool)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_byte_of_the_image_is_the_naive_ones(
        max_rank in 1u32..40,
        expert_rank in 1u32..40,
        rank in 1u32..40,
        experts in prop::sample::subsequence(vec![0usize, 1, 2], 0..=3),
        rotated in any::<prop::sample::Index>(),
    ) {
        let rank = rank.min(max_rank).min(expert_rank);
        let model = moe_model();
        let spec = pool(max_rank, expert_rank);
        let adapter = Adapter::new("a", &Geometry::dense(&model, rank as usize).with_experts(&experts), 1.0);
        let mut pairs = audit(&adapter, &model, &spec).pairs;
        let middle = rotated.index(pairs.len());
        pairs.rotate_left(middle);
        let layout = PoolLayout::new(&model, &spec).unwrap();
        let packed = pack(&adapter.store, &pairs, &layout);
        let wanted = naive(&adapter.store, &pairs, &layout);
        let bits = |image: &[bf16]| image.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        prop_assert!(bits(&packed) == bits(&wanted));
    }
}

#[test]
fn f16_and_f32_become_bf16_to_nearest_even() {
    let model = tiny_model();
    let values: Vec<f32> = (0..4 * 32).map(|i| 1.0 + i as f32 / 1024.0).collect();
    let halves: Vec<u8> = values
        .iter()
        .flat_map(|v| f16::from_f32(*v).to_le_bytes())
        .collect();
    let name = "base_model.model.model.layers.1.self_attn.o_proj";
    let tensors = [
        MemoryTensor::from_f32(format!("{name}.lora_A.weight"), [4, 32], &values),
        MemoryTensor::new(
            format!("{name}.lora_B.weight"),
            TensorDtype::F16,
            [32, 4],
            halves,
        ),
    ];
    let json = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": false, "target_modules": ["o_proj"]}"#;
    let store = AdapterStore::from_tensors(json, tensors).unwrap();
    let config = lora_config::parse_peft_adapter_config(json, &Default::default()).unwrap();
    let spec = PoolSpec::new(1, 8);
    let pairs = audit_adapter(&store, &config, &model, &spec).pairs;
    let layout = PoolLayout::new(&model, &spec).unwrap();
    assert_eq!(
        pack(&store, &pairs, &layout),
        naive(&store, &pairs, &layout)
    );
}

/// An adapter of a pool of rank 8, with a place for everything.
fn fitting() -> (Adapter, AuditReport, PoolLayout) {
    let model = moe_model();
    let spec = pool(8, 8);
    let adapter = Adapter::new("a", &Geometry::dense(&model, 4).with_experts(&[1]), 1.0);
    let report = audit(&adapter, &model, &spec);
    let layout = PoolLayout::new(&model, &spec).unwrap();
    (adapter, report, layout)
}

#[test]
fn a_pair_without_its_place_is_refused_with_both_numbers() {
    let (adapter, report, layout) = fitting();
    let refusal = |change: &dyn Fn(&mut Vec<AuditedPair>)| {
        let mut pairs = report.pairs.clone();
        change(&mut pairs);
        let bytes = image_bytes(&layout, &pairs).unwrap();
        let mut image = vec![0u16; bytes / 2];
        let source = PackSource {
            store: &adapter.store,
            pairs: &pairs,
        };
        match pack_adapter(source, &layout, bytemuck::cast_slice_mut(&mut image)) {
            Err(WeightsError::PairMismatch {
                what,
                found,
                expected,
                ..
            }) => (what, found, expected),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refusal(&|pairs| pairs[0].layer = 2), ("layer", 2, 2));
    assert_eq!(refusal(&|pairs| pairs[0].rank = 17), ("rank", 17, 16));
    assert_eq!(refusal(&|pairs| pairs[0].rank = 0), ("rank", 0, 16));
    assert_eq!(refusal(&|pairs| pairs[0].k_in = 33), ("k_in", 33, 32));
    assert_eq!(refusal(&|pairs| pairs[0].n_out = 31), ("n_out", 31, 32));
    assert_eq!(
        refusal(&|pairs| pairs[0].target = LoraTarget::Attn(lora_weights::LoraModule::OutProj)),
        ("module", 1, 0)
    );
    assert_eq!(
        refusal(&|pairs| {
            let again = pairs[0].clone();
            pairs.push(again);
        }),
        ("pairs", 2, 1)
    );
}

#[test]
fn a_staging_buffer_too_short_or_misaligned_is_refused() {
    let (adapter, report, layout) = fitting();
    let source = PackSource {
        store: &adapter.store,
        pairs: &report.pairs,
    };
    let bytes = image_bytes(&layout, &report.pairs).unwrap();
    let mut image = vec![0u16; bytes / 2 + 1];
    let image: &mut [u8] = bytemuck::cast_slice_mut(&mut image);
    let short = pack_adapter(source, &layout, &mut image[..bytes - 2]);
    assert!(matches!(short, Err(WeightsError::BadStaging { .. })));
    let odd = pack_adapter(source, &layout, &mut image[1..bytes + 1]);
    assert!(matches!(
        odd,
        Err(WeightsError::BadStaging { alignment: 1, .. })
    ));
    pack_adapter(source, &layout, &mut image[..bytes]).unwrap();
}

#[test]
fn an_image_is_the_slot_and_a_unit_for_each_expert_and_router_pair() {
    let (_, report, layout) = fitting();
    // Two layers of a router and three projections.
    let units = 2 * (1 + 3);
    let bytes = layout.bytes();
    assert_eq!(
        image_bytes(&layout, &report.pairs).unwrap() as u64,
        bytes.slot + units * bytes.expert_unit
    );
    assert_eq!(packed_stride(4), 16);
}
