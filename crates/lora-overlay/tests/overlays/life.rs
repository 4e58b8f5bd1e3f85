//! An overlay follows its slot: through promotion, swap, unload and failure, with nothing left behind.

use crate::expected::held;
use crate::faulty::{BROKEN, Faulty, faulty};
use crate::world::{Parts, Table, World};
use lora_config::AdapterConfig;
use lora_kernels::testing::TestBackend;
use lora_overlay::{OverlaySlotRows, TokenOverlaySet};
use lora_weights::device::DeviceMemory;
use lora_weights::{
    AdapterSlot, AdapterStore, LoraAdapterInput, LoraWeights, PoolSpec, Released, Unloaded,
    WeightsError,
};
use std::sync::Arc;

/// A pool of three slots and their overlays, all empty.
struct Setup {
    memory: Arc<Faulty>,
    world: World,
    weights: LoraWeights,
    set: Arc<TokenOverlaySet>,
    /// Bytes free while no slot has an overlay.
    free: u64,
}

struct Named {
    name: String,
    store: AdapterStore,
    config: AdapterConfig,
}

impl Setup {
    fn new() -> Self {
        let memory = faulty(16 << 20);
        let world = World::new(&(memory.host().clone() as TestBackend), (48, 16), true);
        let mut pool = PoolSpec::new(3, 16);
        pool.policy.overlays = true;
        pool.policy.allow_rotation = true;
        let weights = LoraWeights::new(memory.clone(), world.model.clone(), pool);
        let shape = world.served().shape(16).expect("tables");
        let set = TokenOverlaySet::from_slots(memory.clone(), shape, [None, None, None]);
        let mut setup = Self {
            memory,
            weights: weights.expect("a pool"),
            set: Arc::new(set.expect("tables")),
            world,
            free: 0,
        };
        setup.free = setup.free_now();
        setup
    }

    fn free_now(&self) -> u64 {
        self.memory.memory_info().expect("counts").free
    }

    fn fail_upload(&self, n: u32) {
        self.memory.hooks().fail_upload(n);
    }

    /// An adapter of these trained tokens; with none, one without an overlay, which the config alone names.
    fn adapter(&self, name: &str, ids: &[u32]) -> (Named, Arc<OverlaySlotRows>) {
        let rows = Table::random(ids.len(), 16, ids.len() as u64);
        let parts = || match ids {
            [] => {
                let q = "base_model.model.model.layers.0.self_attn.q_proj";
                let a = Table::random(4, 16, 3).tensor(format!("{q}.lora_A.weight"));
                let b = Table::random(16, 4, 4).tensor(format!("{q}.lora_B.weight"));
                Parts::new(r#""target_modules": ["q_proj"]"#, [a, b])
            }
            ids => Parts::tokens(ids, &rows),
        };
        let overlay = self.world.build(parts()).expect("builds");
        let rows = OverlaySlotRows::new(Arc::clone(&self.set), overlay);
        let (store, config) = parts().store();
        let named = Named {
            name: name.to_owned(),
            store,
            config,
        };
        (named, Arc::new(rows))
    }

    /// Into a cache slot.
    fn promote(&self, name: &str, ids: &[u32]) -> Result<Arc<AdapterSlot>, WeightsError> {
        let (named, rows) = self.adapter(name, ids);
        let input = LoraAdapterInput::new(&named.name, &named.store, &named.config);
        self.weights.promote(&input.with_extension(rows))
    }

    fn swap(&self, slot: u32, name: &str, ids: &[u32]) -> Result<Arc<AdapterSlot>, WeightsError> {
        let (named, rows) = self.adapter(name, ids);
        let input = LoraAdapterInput::new(&named.name, &named.store, &named.config);
        self.weights.swap(slot, &input.with_extension(rows))
    }

    /// Ids that a slot overrides; empty without an overlay.
    fn ids(&self, slot: u32) -> Vec<u32> {
        let overlay = self.set.overlay(slot);
        overlay.map_or(Vec::new(), |overlay| {
            held(&overlay).embed.into_keys().collect()
        })
    }

    /// Overlays take what their slots report, and nothing else is taken.
    fn nothing_is_lost(&self) {
        let slots = (0..3).filter_map(|slot| self.set.overlay(slot));
        let held: u64 = slots.map(|overlay| overlay.device_bytes()).sum();
        assert_eq!(self.free - self.free_now(), held);
    }
}

#[test]
fn an_overlay_comes_and_goes_with_its_slot() {
    let setup = Setup::new();
    for (slot, ids) in [(0, vec![7, 3]), (1, vec![]), (2, vec![9])] {
        let name = slot.to_string();
        assert_eq!(setup.promote(&name, &ids).expect("promotes").slot(), slot);
        setup.nothing_is_lost();
    }
    assert_eq!(
        (setup.ids(0), setup.ids(1), setup.ids(2)),
        (vec![3, 7], vec![], vec![9])
    );

    // Swapped for another, for itself with other rows, and for none.
    for ids in [vec![40, 41, 42], vec![1], vec![]] {
        setup.swap(2, "2", &ids).expect("swaps");
        assert_eq!(setup.ids(2), ids);
        setup.nothing_is_lost();
    }

    // Evicted by a promotion: slot 1 was used longest ago once 0 is touched.
    setup.weights.touch_slot(0);
    setup.weights.touch_slot(2);
    let promoted = setup.promote("new", &[20]).expect("promotes");
    assert_eq!((promoted.slot(), setup.ids(1)), (1, vec![20]));
    setup.nothing_is_lost();

    // Unloaded, at once and when the last request has ended.
    assert!(
        matches!(setup.weights.unload(1), Ok(Unloaded::Freed(freed)) if freed.extension_bytes > 0)
    );
    assert!(setup.ids(1).is_empty());
    let lease = setup.weights.acquire_slot(0);
    assert!(matches!(
        setup.weights.unload(0),
        Ok(Unloaded::Draining { refs: 1 })
    ));
    assert_eq!(setup.ids(0), [3, 7], "a request still reads it");
    assert!(matches!(
        setup.weights.release_slot(lease),
        Released::Freed(_)
    ));
    setup.weights.unload(2).expect("unloads");
    assert!(!setup.set.any_active());
    assert_eq!(setup.free_now(), setup.free);
}

#[test]
fn a_failed_swap_takes_its_overlay_with_it() {
    let setup = Setup::new();
    setup.promote("a", &[7]).expect("promotes");
    let mut failed = 0;
    for upload in 1.. {
        setup.swap(0, "a", &[7, 3]).expect("swaps");
        let generation = setup.weights.adapter(0).map(|adapter| adapter.generation());
        setup.fail_upload(upload);
        let swapped = setup.swap(0, "b", &[9]);
        let reached = setup.memory.hooks().heal_uploads();
        setup.nothing_is_lost();
        match swapped {
            Ok(adapter) => {
                assert_eq!((adapter.name(), setup.ids(0)), ("b", vec![9]));
                // An upload that only clears may fail unnoticed by the swap: the slot is written anyway.
                if !reached {
                    break;
                }
            }
            Err(_) => {
                failed += 1;
                assert!(setup.ids(0).is_empty(), "upload {upload}");
                assert!(setup.weights.adapter(0).is_none(), "{generation:?}");
            }
        }
    }
    assert!(failed > 2, "{failed} failures");
}

#[test]
fn rows_that_a_record_still_names_are_kept_until_it_is_cleared() {
    let setup = Setup::new();
    setup.promote("a", &[7]).expect("promotes");
    setup.fail_upload(BROKEN);
    let unloaded = setup.weights.unload(0);
    assert!(matches!(unloaded, Err(WeightsError::Upload { .. })));
    assert!(setup.ids(0).is_empty(), "the slot has no overlay");
    assert!(setup.free_now() < setup.free, "its rows are kept");
    setup.fail_upload(0);
    setup.promote("b", &[]).expect("promotes");
    assert_eq!(setup.free_now(), setup.free);
}
