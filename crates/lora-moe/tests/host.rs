//! The test bodies on the host backend, and what the tables refuse.

use lora_kernels::host::HostBackend;
use lora_kernels::testing::TestBackend;
use lora_moe::testing::{all_folds_agree, router_folds_agree, tables_follow_their_slots};
use lora_moe::{ExpertFold, ExpertTables, ExpertTablesSpec, MoeError};
use lora_weights::device::{DeviceMemory, DevicePtr, LoraPair};
use lora_weights::{ExpertLoraLayer, ExpertProj};
use std::sync::Arc;

fn backend() -> TestBackend {
    Arc::new(HostBackend::new())
}

#[test]
fn folds_agree_to_the_bit() {
    all_folds_agree(&backend());
}

#[test]
fn router_folds_agree_to_the_bit() {
    router_folds_agree(&backend());
}

#[test]
fn a_slot_and_its_tables_come_and_go_together() {
    tables_follow_their_slots(&backend());
}

fn spec() -> ExpertTablesSpec {
    ExpertTablesSpec {
        layers: vec![1, 3],
        num_experts: 4,
        slots: 6,
        residents: 2,
        projections: [(8, 6), (8, 6), (6, 8)],
        max_rank: 16,
    }
}

fn tables() -> ExpertTables {
    let memory: Arc<dyn DeviceMemory> = Arc::new(HostBackend::new());
    ExpertTables::new(memory, spec()).unwrap()
}

/// Layers with one adapted expert.
fn layers(layer: usize, expert: usize, k_in: u32) -> Vec<ExpertLoraLayer> {
    let pair = LoraPair {
        a: DevicePtr(256),
        b: DevicePtr(512),
        rank: 4,
        k_in,
        n_out: 6,
        scale: 0.5,
        max_rank: 16,
    };
    let mut layers = vec![ExpertLoraLayer::default(); 4];
    layers[layer] = ExpertLoraLayer::from_pairs(None, [(expert, ExpertProj::Up, pair)]);
    layers
}

#[test]
fn tables_take_what_is_resident_and_no_more() {
    let tables = tables();
    let spec = tables.spec();
    // Two residents, four experts, two layers of three projections, 24 bytes; four a slot.
    assert_eq!(tables.bytes(), 2 * 4 * 2 * 3 * 24 + 6 * 4);
    assert_eq!(spec.bytes().unwrap(), tables.bytes());
    tables.install(5, &layers(1, 0, 8)).unwrap();
    tables
        .install(0, &vec![ExpertLoraLayer::default(); 4])
        .unwrap();
    tables.install(2, &layers(3, 3, 8)).unwrap();
    assert_eq!(tables.resident_slots(), [2, 5]);
    let full = tables.install(1, &layers(1, 0, 8)).unwrap_err();
    assert_eq!(full, MoeError::TablesFull { residents: 2 });
    tables.install(5, &layers(3, 1, 8)).unwrap();
    tables.remove(2).unwrap();
    tables.install(1, &layers(1, 0, 8)).unwrap();
    assert_eq!(tables.resident_slots(), [1, 5]);
}

#[test]
fn what_does_not_fit_the_tables_is_refused_by_name() {
    let tables = tables();
    let refused = |slot, layers: &[ExpertLoraLayer]| tables.install(slot, layers).unwrap_err();
    assert_eq!(
        refused(6, &layers(1, 0, 8)),
        MoeError::SlotOutOfRange { slot: 6, slots: 6 }
    );
    assert_eq!(refused(0, &layers(2, 0, 8)), MoeError::NotMoe { layer: 2 });
    assert_eq!(
        refused(0, &layers(1, 4, 8)),
        MoeError::ExpertOutOfRange {
            layer: 1,
            expert: 4,
            num_experts: 4
        }
    );
    let mismatch = refused(0, &layers(1, 0, 9));
    assert!(matches!(
        mismatch,
        MoeError::PairMismatch {
            layer: 1,
            expert: 0,
            found: (9, 6, 16),
            expected: (8, 6, 16),
            ..
        }
    ));
    assert!(tables.resident_slots().is_empty());
    assert_eq!(
        ExpertFold::new(&tables, 2),
        Err(MoeError::NotMoe { layer: 2 })
    );
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let bad = [
        ExpertTablesSpec {
            residents: 7,
            ..spec()
        },
        ExpertTablesSpec {
            num_experts: 0,
            ..spec()
        },
        ExpertTablesSpec {
            layers: vec![],
            ..spec()
        },
        ExpertTablesSpec {
            slots: 4096,
            residents: 4096,
            num_experts: 513,
            ..spec()
        },
    ];
    for spec in bad {
        assert!(matches!(spec.bytes(), Err(MoeError::BadTables { .. })));
    }
}
