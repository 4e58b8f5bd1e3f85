//! Expert tables follow the slots of a pool.

use crate::{adapter, model, runtime};
use lora_runtime::moe::{ExpertSlotTables, ExpertTables, ExpertTablesSpec};
use lora_runtime::weights::{
    AdapterSlot, ExpertPoolSpec, ExpertProj, LoraAdapterInput, SlotTarget, WeightsError,
};
use lora_runtime::{LoraRuntime, RuntimeOptions, whole_adapter_units};
use std::sync::Arc;

const FIRST: &str = "qwen3_moe_params";
const SECOND: &str = "qwen3_moe_v4_per_expert";

/// A pool of three slots, `FIRST` in slot 0, and tables for `residents` adapters.
fn engine(residents: u32) -> (LoraRuntime, Arc<ExpertTables>) {
    let mut options = RuntimeOptions::new(3, 16);
    options.pool.experts = Some(ExpertPoolSpec {
        max_rank: 16,
        units: 3 * whole_adapter_units(&model(FIRST)),
    });
    let runtime = runtime(FIRST, options);
    let layout = runtime.weights().layout();
    let spec = ExpertTablesSpec::of_layout(layout, residents).expect("a MoE model");
    let memory = Arc::clone(runtime.kernels().backend()) as Arc<_>;
    let tables = Arc::new(ExpertTables::new(memory, spec).expect("fits"));
    let loaded = runtime
        .load(&[adapter(&runtime, FIRST)])
        .expect("loads")
        .remove(0);
    let extension = ExpertSlotTables::new(Arc::clone(&tables), loaded.experts());
    runtime
        .weights()
        .attach_extension(0, loaded.generation(), Arc::new(extension))
        .expect("nobody holds it");
    (runtime, tables)
}

/// Brings `case` into a cache slot, its experts with it.
fn promote(
    runtime: &LoraRuntime,
    tables: &Arc<ExpertTables>,
    case: &str,
) -> Result<Arc<AdapterSlot>, WeightsError> {
    let adapter = adapter(runtime, case);
    let input = LoraAdapterInput::new(adapter.name(), adapter.store(), adapter.config());
    let staged = runtime.weights().stage(&input).expect("loads");
    let mut transaction = staged.begin(SlotTarget::Victim).expect("a slot is free");
    let extension = ExpertSlotTables::new(Arc::clone(tables), transaction.adapter().experts());
    transaction.attach(Arc::new(extension));
    transaction.commit()
}

#[test]
fn experts_are_reachable_from_commit_to_unload() {
    let (runtime, tables) = engine(2);
    assert_eq!(tables.resident_slots(), [0]);
    let second = promote(&runtime, &tables, SECOND).expect("there is room");
    assert!(second.has_experts());
    assert_eq!(tables.resident_slots(), [0, second.slot()]);

    // The entries are the pairs of the slots.
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
    for (place, adapter) in [(0, &first), (1, &second)] {
        for expert in 0..experts {
            let pair = adapter.experts()[1].pair(expert, ExpertProj::Down);
            let address = addresses[place * experts + expert];
            assert_eq!(address, pair.map_or(0, |pair| pair.a.0), "{place} {expert}");
        }
    }

    runtime.unload(second.slot()).expect("nobody holds it");
    assert_eq!(tables.resident_slots(), [0]);
    promote(&runtime, &tables, SECOND).expect("its place is free again");
    assert_eq!(tables.resident_slots(), [0, 1]);
}

#[test]
fn an_adapter_without_room_in_the_tables_leaves_a_placeholder() {
    let (runtime, tables) = engine(1);
    let error = promote(&runtime, &tables, SECOND).expect_err("the tables hold one adapter");
    assert!(
        matches!(&error, WeightsError::Extension { slot: 1, .. }),
        "{error}"
    );
    assert!(runtime.weights().adapter(1).is_none());
    assert_eq!(tables.resident_slots(), [0]);
}
