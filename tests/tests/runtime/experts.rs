//! Experts follow the slots of a runtime by themselves.

use crate::{adapter, bits, matrix, model, runtime};
use lora_runtime::config::GateUpOrder;
use lora_runtime::kernels::{Applied, DeviceBuffer, ExpertRouting, GateUpOut, SiteKind, Stream};
use lora_runtime::moe::{ExpertRows, MoeError};
use lora_runtime::weights::{AdapterStore, ExpertPoolSpec, ExpertProj, MemoryTensor, WeightsError};
use lora_runtime::{Adapter, LoraRuntime, RuntimeError, RuntimeOptions, whole_adapter_units};
use std::num::NonZeroU32;

const FIRST: &str = "qwen3_moe_params";
const SECOND: &str = "qwen3_moe_v4_per_expert";

fn options(slots: u32) -> RuntimeOptions {
    let mut options = RuntimeOptions::new(slots, 16);
    options.pool.policy.allow_rotation = true;
    options.pool.experts = Some(ExpertPoolSpec {
        max_rank: 16,
        units: u64::from(slots) * whole_adapter_units(&model(FIRST)),
    });
    options
}

/// A pool with `FIRST` in slot 0.
fn engine(options: RuntimeOptions) -> LoraRuntime {
    let runtime = runtime(FIRST, options);
    runtime.load(&[adapter(&runtime, FIRST)]).expect("loads");
    runtime
}

fn resident(runtime: &LoraRuntime) -> Vec<u32> {
    let tables = runtime.expert_tables().expect("a pool with experts");
    tables.resident_slots()
}

#[test]
fn experts_are_reachable_from_commit_to_unload() {
    let runtime = engine(options(3));
    assert_eq!(resident(&runtime), [0]);
    let second = adapter(&runtime, SECOND);
    let promoted = runtime.promote(&second).expect("a slot is free");
    assert!(promoted.has_experts());
    assert_eq!(resident(&runtime), [0, promoted.slot()]);

    // The entries are the pairs of the slots.
    let tables = runtime.expert_tables().expect("a pool with experts");
    let route = tables.route(1, ExpertProj::Down).expect("layer 1 is MoE");
    let memory = runtime.kernels().backend();
    let mut bytes = vec![0; route.slots as usize * 8];
    memory.download(route.a_table, &mut bytes).expect("reads");
    let addresses: Vec<u64> = bytes
        .chunks_exact(8)
        .map(|entry| u64::from_ne_bytes(entry.try_into().expect("eight bytes")))
        .collect();
    let experts = tables.spec().num_experts as usize;
    let first = runtime.weights().adapter(0).expect("loaded");
    for (place, adapter) in [(0, &first), (1, &promoted)] {
        for expert in 0..experts {
            let pair = adapter.experts()[1].pair(expert, ExpertProj::Down);
            let address = addresses[place * experts + expert];
            assert_eq!(address, pair.map_or(0, |pair| pair.a.0), "{place} {expert}");
        }
    }

    runtime.unload(promoted.slot()).expect("nobody holds it");
    assert_eq!(resident(&runtime), [0]);
    runtime.promote(&second).expect("its place is free again");
    assert_eq!(resident(&runtime), [0, 1]);
}

/// An adapter of q alone.
fn attention_alone() -> Adapter {
    let json = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": false, "target_modules": ["q_proj"]}"#;
    let tensors = (0..2).flat_map(|layer| {
        let name = |factor: &str| {
            format!("base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight")
        };
        [
            MemoryTensor::from_f32(name("A"), [2, 32], &[0.5; 64]),
            MemoryTensor::from_f32(name("B"), [32, 2], &[0.25; 64]),
        ]
    });
    let store = AdapterStore::from_tensors(json, tensors).expect("holds together");
    Adapter::from_store("q", store, &Default::default()).expect("parses")
}

#[test]
fn a_swap_brings_other_experts_or_none() {
    let runtime = engine(options(2));
    runtime
        .swap(0, &attention_alone())
        .expect("rotation is allowed");
    assert!(resident(&runtime).is_empty());
    let second = adapter(&runtime, SECOND);
    runtime.swap(0, &second).expect("back to experts");
    assert_eq!(resident(&runtime), [0]);
}

#[test]
fn an_adapter_without_room_in_the_tables_leaves_a_placeholder() {
    let mut options = options(3);
    options.expert_residents = Some(1);
    let runtime = engine(options);
    let error = runtime
        .promote(&adapter(&runtime, SECOND))
        .expect_err("the tables hold one");
    assert!(
        matches!(&error, RuntimeError::Weights(WeightsError::Extension { slot: 1, source })
            if matches!(source.downcast_ref(), Some(MoeError::TablesFull { residents: 1 }))),
        "{error}"
    );
    assert!(runtime.weights().adapter(1).is_none());
    assert_eq!(resident(&runtime), [0]);
    let (free, all) = runtime.weights().expert_units();
    let held = runtime.report().adapters[0].expert_pairs as u64;
    assert_eq!(free, all - held, "the failed adapter's units are free");
}

#[test]
fn a_pool_without_experts_has_no_tables_and_says_so() {
    let runtime = runtime(FIRST, RuntimeOptions::new(2, 16));
    assert!(runtime.expert_tables().is_none());
    let error = runtime.expert_rows(8).expect_err("there are no tables");
    assert!(matches!(error, RuntimeError::NoExpertTables), "{error}");
    assert_eq!(runtime.report().expert_tables, 0);
}

/// Six rows of one token each, all of them with the adapter in slot 0.
fn six_rows<'a>(
    runtime: &LoraRuntime,
    experts: &'a DeviceBuffer,
) -> (ExpertRows, ExpertRouting<'a>) {
    let routing = ExpertRouting::Unsorted {
        experts: experts.expert_ids(6).expect("six"),
        top_k: NonZeroU32::MIN,
    };
    let backend = runtime.kernels().backend();
    let slots = DeviceBuffer::from_slice(backend.clone(), &[0; 6]).expect("memory");
    let mut rows = runtime.expert_rows(6).expect("fits");
    let adapters = slots.token_adapters(6).expect("six");
    runtime
        .route_experts(&mut rows, Stream::OWN, routing, adapters)
        .expect("routes");
    (rows, routing)
}

#[test]
fn gate_and_up_in_one_out_fold_where_they_stand_one_after_the_other() {
    let runtime = engine(options(1));
    let experts =
        DeviceBuffer::from_slice(runtime.kernels().backend().clone(), &[0, 2, 1, 2, 0, 1]);
    let experts = experts.expect("memory");
    let (rows, routing) = six_rows(&runtime, &experts);
    let mut scratch = runtime.scratch(6).expect("fits");
    let x = matrix(&runtime, 6, 32, 1);
    let token_x = routing.token_x(x.mat(6, 32, 32).expect("fits"));
    let [mut fused, mut apart] = [2, 2].map(|seed| matrix(&runtime, 6, 24, seed));
    let before = bits(&fused, 6 * 24);
    let fold = runtime.expert_fold(1).expect("layer 1 is MoE");
    let mut ctx = runtime.context(Stream::OWN, &mut scratch);
    let out = |buffer: &mut DeviceBuffer, order, ctx: &mut _| {
        let out = buffer.mat_mut(6, 24, 24).expect("fits");
        fold.apply_fused_gate_up(ctx, &rows, token_x, out, order)
    };
    let refused = out(&mut fused, GateUpOrder::Interleaved, &mut ctx);
    assert_eq!(refused, Err(MoeError::InterleavedOut { width: 24 }));
    assert_eq!(
        bits(&fused, 6 * 24),
        before,
        "a refused fold writes nothing"
    );
    let applied = out(&mut fused, GateUpOrder::Concatenated, &mut ctx);
    assert_eq!(applied, Ok(Applied::Launched { launches: 1 }));
    let [gate, up] = apart
        .mat_mut(6, 24, 24)
        .expect("fits")
        .split_cols([12, 12])
        .expect("halves");
    let _ = fold
        .apply_gate_up_rows(&mut ctx, &rows, token_x, GateUpOut { gate, up })
        .expect("launches");
    let folded = bits(&fused, 6 * 24);
    assert!(folded == bits(&apart, 6 * 24) && folded != before);
}

/// Three tokens, top-2 of three experts: the first adapter's, the second's, none.
#[test]
fn a_block_folds_each_token_with_its_own_adapter_as_pairs_do() {
    let runtime = engine(options(2));
    runtime
        .promote(&adapter(&runtime, SECOND))
        .expect("a slot is free");
    let chosen = [0, 2, 1, 2, 0, 1];
    let experts = DeviceBuffer::from_slice(runtime.kernels().backend().clone(), &chosen);
    let experts = experts.expect("memory");
    let routing = ExpertRouting::Unsorted {
        experts: experts.expert_ids(6).expect("six"),
        top_k: NonZeroU32::new(2).expect("two"),
    };
    let (mut batch, mut scratch) = (
        runtime.batch(8).expect("fits"),
        runtime.scratch(8).expect("fits"),
    );
    let requests = [0, 1, lora_runtime::weights::BASE_SLOT];
    runtime
        .route(&mut batch, Stream::OWN, &requests, 3)
        .expect("slots exist");
    let mut rows = runtime.expert_rows(8).expect("fits");
    let adapters = batch.token_adapters().expect("three");
    runtime
        .route_experts(&mut rows, Stream::OWN, routing, adapters)
        .expect("routes");

    let (x, act) = (matrix(&runtime, 3, 32, 1), matrix(&runtime, 6, 12, 2));
    let [mut gate, mut up] = [3, 4].map(|seed| matrix(&runtime, 6, 12, seed));
    let mut down = matrix(&runtime, 6, 32, 5);
    let mut ctx = runtime.context(Stream::OWN, &mut scratch);
    let out = GateUpOut {
        gate: gate.mat_mut(6, 12, 12).expect("fits"),
        up: up.mat_mut(6, 12, 12).expect("fits"),
    };
    let token_x = routing.token_x(x.mat(3, 32, 32).expect("fits"));
    let launched = Applied::Launched { launches: 1 };
    let applied = runtime.apply_expert_gate_up(&mut ctx, &rows, 1, token_x, out);
    assert_eq!(applied.expect("launches"), launched);
    let (act_rows, out) = (act.mat(6, 12, 12), down.mat_mut(6, 32, 32));
    let (act_rows, out) = (act_rows.expect("fits"), out.expect("fits"));
    let applied = runtime.apply_expert_down(&mut ctx, &rows, 1, act_rows, out);
    assert_eq!(applied.expect("launches"), launched);

    for (proj, folded, width, seed) in [
        (ExpertProj::Gate, &gate, 12, 3),
        (ExpertProj::Up, &up, 12, 4),
        (ExpertProj::Down, &down, 32, 5),
    ] {
        let mut alone = matrix(&runtime, 6, width, seed);
        let before = bits(&alone, 6 * width);
        for (row, expert) in chosen.into_iter().enumerate() {
            let token = row / 2;
            let adapter = u32::try_from(requests[token]).ok();
            let adapter = adapter.and_then(|slot| runtime.weights().adapter(slot));
            let pair = adapter.and_then(|adapter| adapter.experts()[1].pair(expert as usize, proj));
            let x_row = match proj {
                ExpertProj::Down => act.mat(6, 12, 12).expect("fits").row_range(row..row + 1),
                _ => x.mat(3, 32, 32).expect("fits").row_range(token..token + 1),
            };
            let out = alone.mat_mut(6, width, width).expect("fits");
            let out = out.row_range(row..row + 1).expect("a row");
            let kind = SiteKind::Expert;
            let applied = runtime.apply_pair(&mut ctx, kind, pair, x_row.expect("a row"), out);
            assert_eq!(applied.expect("launches") == launched, pair.is_some());
        }
        let alone = bits(&alone, 6 * width);
        assert_eq!(bits(folded, 6 * width), alone, "{proj:?}");
        assert_ne!(alone[..4 * width], before[..4 * width], "{proj:?}");
        assert_eq!(alone[4 * width..], before[4 * width..], "base rows");
    }
}
