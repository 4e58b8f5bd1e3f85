use super::*;
use crate::device::DevicePtr;
use crate::names::specs;
use crate::{ExpertPoolSpec, ExpertProj, LoraTarget, ModuleSet, RANK_GRANULE};
use lora_config::FfnKind;
use proptest::prelude::*;
use std::ops::Range;

fn models() -> impl Strategy<Value = ModelSpec> {
    let kind = prop::sample::select(vec![
        specs::llama(),
        specs::phi3(),
        specs::qwen3_moe(),
        specs::gpt_oss(),
        specs::llama4(),
        specs::qwen3_5(),
        specs::qwen3_next(),
    ]);
    (kind, 1usize..200, 1usize..5, 1usize..70, 1usize..6).prop_map(
        |(mut model, hidden, heads, width, repeat)| {
            model.hidden_size = hidden;
            model.heads = heads * model.kv_heads;
            for layer in &mut model.layers {
                if let FfnKind::Dense { width: dense } = &mut layer.ffn {
                    *dense = width + 3;
                }
            }
            if let Some(moe) = &mut model.moe {
                moe.expert_width = width;
                moe.num_experts = 1 + width % 9;
            }
            model.layers = model.layers.repeat(repeat);
            model
        },
    )
}

fn pools() -> impl Strategy<Value = PoolSpec> {
    let modules = prop::sample::subsequence(LoraModule::every().collect::<Vec<_>>(), 0..=20);
    let experts = prop::option::of((1u32..40, 0u64..50));
    (1u32..9, 1u32..130, modules, experts).prop_map(|(slots, rank, modules, experts)| PoolSpec {
        modules: modules.into_iter().collect(),
        experts: experts.map(|(max_rank, units)| ExpertPoolSpec { max_rank, units }),
        ..PoolSpec::new(slots, rank)
    })
}

/// Fails unless the ranges follow each other without overlap, inside `0..end`.
fn assert_disjoint(mut ranges: Vec<Range<u64>>, end: u64) {
    ranges.sort_by_key(|range| range.start);
    let mut free_from = 0;
    for range in ranges {
        assert!(range.start >= free_from, "{range:?} overlaps");
        free_from = range.end;
    }
    assert!(free_from <= end, "{free_from} is past {end}");
}

proptest! {
    #[test]
    fn regions_follow_each_other_aligned_and_fill_the_slot(model in models(), pool in pools()) {
        let layout = PoolLayout::new(&model, &pool).unwrap();
        let mut end = 0;
        for region in layout.regions() {
            prop_assert_eq!(region.a_offset, end);
            let (out, k_in) = region.module.dims(&model, region.layer).unwrap();
            let bytes = |width: usize| u64::from(region.max_rank) * width as u64 * 2;
            prop_assert_eq!(region.b_offset, end + bytes(k_in));
            prop_assert_eq!(region.a_offset % REGION_ALIGNMENT, 0);
            prop_assert_eq!(region.b_offset % REGION_ALIGNMENT, 0);
            prop_assert_eq!(region.max_rank % RANK_GRANULE, 0);
            prop_assert!(region.max_rank >= pool.max_rank);
            prop_assert!(region.max_rank < pool.max_rank + RANK_GRANULE);
            prop_assert_eq!((region.n_out as usize, region.k_in as usize), (out, k_in));
            end = region.b_offset + bytes(out);
        }
        let bytes = layout.bytes();
        prop_assert_eq!(bytes.slot, end);
        prop_assert_eq!(pool_slot_bytes(&model, &pool).unwrap(), end);
        prop_assert_eq!(module_slot_offsets(&model, &pool).unwrap(), layout.regions());
        prop_assert_eq!(bytes.slots, slot_base_offset(pool.max_loras, end).unwrap());
        prop_assert_eq!(bytes.total(), bytes.slots + bytes.tables + bytes.experts);
    }

    #[test]
    fn every_enabled_module_that_a_layer_has_is_found_once_and_in_order(model in models(), pool in pools()) {
        let layout = PoolLayout::new(&model, &pool).unwrap();
        let mut expected = Vec::new();
        for layer in 0..model.layers.len() {
            for module in LoraModule::every() {
                let has = pool.modules.contains(module) && module.applies_to_layer(&model, layer);
                prop_assert_eq!(layout.region(layer, module).is_some(), has);
                if has {
                    let (table, region) = layout.region(layer, module).unwrap();
                    prop_assert_eq!((region.layer, region.module), (layer, module));
                    prop_assert_eq!(table, expected.len());
                    expected.push((layer, module));
                }
            }
        }
        let walked: Vec<_> = layout.regions().iter().map(|r| (r.layer, r.module)).collect();
        prop_assert_eq!(walked, expected);
        prop_assert!(layout.region(model.layers.len(), LoraModule::QProj).is_none());
    }

    #[test]
    fn table_entries_of_all_slots_are_disjoint_and_where_the_copies_write(model in models(), pool in pools()) {
        let layout = PoolLayout::new(&model, &pool).unwrap();
        let tables = layout.tables();
        let base = DevicePtr(4096);
        let mut entries = Vec::new();
        for slot in 0..pool.max_loras {
            let copies = tables.copies(base, slot, 40);
            prop_assert_eq!(copies.len(), if tables.tables() == 0 { 0 } else { 4 });
            let mut src = 40;
            for (kind, copy) in copies.iter().enumerate() {
                let width = [8, 8, 4, 4][kind];
                prop_assert_eq!(copy.src_offset, src);
                prop_assert_eq!((copy.row_bytes, copy.src_stride, copy.rows), (width, width, tables.tables()));
                src += width * tables.tables();
                for table in 0..tables.tables() {
                    let written = copy.dst.0 + (table * copy.dst_stride) as u64;
                    let route = base.0 + tables.offsets(table).unwrap()[kind];
                    prop_assert_eq!(written, route + u64::from(slot) * width as u64);
                    prop_assert_eq!(written % width as u64, 0);
                    entries.push(written - base.0..written - base.0 + width as u64);
                }
            }
            prop_assert_eq!(src - 40, tables.image_bytes());
        }
        prop_assert_eq!(tables.offsets(tables.tables()), None);
        assert_disjoint(entries, tables.bytes());
    }

    #[test]
    fn a_unit_has_room_for_any_expert_or_router_pair(model in models(), pool in pools()) {
        let layout = PoolLayout::new(&model, &pool).unwrap();
        let (Some(spec), true) = (pool.experts, model.moe.is_some()) else {
            prop_assert!(layout.experts().is_none());
            prop_assert_eq!(layout.bytes().experts, 0);
            return Ok(());
        };
        let experts = layout.experts().unwrap();
        let stride = u64::from(packed_stride(spec.max_rank));
        let mut largest = 0;
        for (layer, kinds) in model.layers.iter().enumerate() {
            prop_assert_eq!(layout.router_table(layer).is_some(), kinds.ffn == FfnKind::Moe);
            let routed = ExpertProj::ALL.map(|proj| LoraTarget::Expert { n: 0, proj });
            for target in routed.into_iter().chain([LoraTarget::Router]) {
                let Some((out, k_in)) = target.dims(&model, layer) else { continue };
                prop_assert_eq!(experts.dims(target), Some((out as u32, k_in as u32)));
                prop_assert_eq!(unit_b_offset(k_in as u32, experts.max_rank()), stride * k_in as u64 * 2);
                largest = largest.max(stride * (out + k_in) as u64 * 2);
            }
        }
        prop_assert_eq!(experts.unit_bytes(), largest);
        prop_assert_eq!(experts.region_bytes(), largest * spec.units);
        prop_assert_eq!(experts.unit_bytes() % REGION_ALIGNMENT, 0);
    }
}

#[test]
fn experts_past_the_last_and_dense_targets_have_no_place_in_the_region() {
    let pool = PoolSpec {
        experts: Some(ExpertPoolSpec {
            max_rank: 8,
            units: 4,
        }),
        ..PoolSpec::new(1, 8)
    };
    let layout = PoolLayout::new(&specs::qwen3_moe(), &pool).unwrap();
    let experts = layout.experts().unwrap();
    let expert = |n| LoraTarget::Expert {
        n,
        proj: ExpertProj::Down,
    };
    assert_eq!(experts.dims(expert(2)), Some((32, 12)));
    assert_eq!(experts.dims(expert(3)), None);
    assert_eq!(experts.dims(LoraTarget::Attn(LoraModule::QProj)), None);
    assert_eq!(experts.router_layers(), [1]);
}

#[test]
fn numbers_that_no_pool_can_have_are_refused_with_their_bounds() {
    let model = specs::llama();
    for (pool, named) in [
        (PoolSpec::new(0, 8), "max_loras"),
        (PoolSpec::new(1, 0), "max_rank"),
        (PoolSpec::new(u32::MAX, 8), "max_loras"),
        (PoolSpec::new(1, u32::MAX), "max_rank"),
    ] {
        match PoolLayout::new(&model, &pool).unwrap_err() {
            WeightsError::BadPoolSpec { field, .. } => assert_eq!(field, named),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn sizes_past_64_bits_are_refused_not_wrapped() {
    let mut model = specs::llama();
    model.hidden_size = usize::MAX / 64;
    let modules = ModuleSet::EMPTY.with(LoraModule::OProj);
    let pool = PoolSpec {
        modules,
        ..PoolSpec::new(1, 1 << 20)
    };
    assert!(matches!(
        PoolLayout::new(&model, &pool),
        Err(WeightsError::LayoutOverflow { .. })
    ));
    let many = PoolSpec {
        experts: Some(ExpertPoolSpec {
            max_rank: 16,
            units: u64::MAX / 2,
        }),
        ..PoolSpec::new(1, 8)
    };
    assert!(matches!(
        PoolLayout::new(&specs::qwen3_moe(), &many),
        Err(WeightsError::LayoutOverflow { .. })
    ));
    assert!(slot_base_offset(2, u64::MAX / 2 + 1).is_err());
}

#[test]
fn expert_bytes_count_the_adapted_pairs_alone() {
    let model = specs::qwen3_moe();
    let pair = |target: LoraTarget| crate::AuditedPair {
        layer: 1,
        target,
        path: String::new(),
        rank: 4,
        k_in: target.dims(&model, 1).unwrap().1,
        n_out: target.dims(&model, 1).unwrap().0,
        scale: 1.0,
        source: crate::PairSource::Whole {
            a: crate::TensorId(0),
            b: crate::TensorId(1),
        },
    };
    let pairs = [
        pair(LoraTarget::Attn(LoraModule::QProj)),
        pair(LoraTarget::Router),
        pair(LoraTarget::Expert {
            n: 2,
            proj: ExpertProj::Up,
        }),
    ];
    // Router 32 -> 3 and expert 32 -> 12, at rank 4 padded to 16, two bytes an element.
    let expected = (16 * 32 + 3 * 16) * 2 + (16 * 32 + 12 * 16) * 2;
    assert_eq!(expert_router_bytes(&pairs, 4).unwrap(), expected);
}
