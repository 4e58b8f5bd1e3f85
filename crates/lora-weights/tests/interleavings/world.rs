//! A small pool that threads of a schedule share, and what must hold of it at any moment.

use crate::common::{Adapter, Geometry, SlotBytes, TestMemory, assert_serves, tiny_model};
use lora_weights::{
    AdapterSlot, AuditReport, LoadPolicy, LoraModule, LoraTarget, LoraWeights, ModuleSet, PoolSpec,
    SlotTarget, WeightsError,
};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

/// Adapters `a` to `d` and what their audit says: the same in every schedule.
static ADAPTERS: LazyLock<Vec<(Adapter, AuditReport)>> = LazyLock::new(|| {
    let spec = tiny_model();
    let geometry = Geometry {
        targets: vec![LoraTarget::Attn(LoraModule::QProj)],
        ..Geometry::dense(&spec, 1)
    };
    let adapters = ["a", "b", "c", "d"].into_iter().zip(1u8..);
    adapters
        .map(|(name, mark)| {
            let adapter = Adapter::new(name, &geometry, mark.into());
            let report =
                lora_weights::audit_adapter(&adapter.store, &adapter.config, &spec, &pool());
            (adapter, report)
        })
        .collect()
});

fn pool() -> PoolSpec {
    PoolSpec {
        modules: ModuleSet::from_iter([LoraModule::QProj]),
        policy: LoadPolicy {
            allow_rotation: true,
            ..LoadPolicy::default()
        },
        ..PoolSpec::new(3, 1)
    }
}

fn adapter(name: &str) -> &'static (Adapter, AuditReport) {
    let found = ADAPTERS.iter().find(|(adapter, _)| adapter.name == name);
    found.expect("one of four")
}

/// What became of a change, in a form that threads can hand over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// With this generation.
    Committed(u64),
    /// By the rules.
    Refused,
}

impl Outcome {
    pub(crate) fn of(result: Result<Arc<AdapterSlot>, WeightsError>) -> Self {
        match result {
            Ok(adapter) => Self::Committed(adapter.generation()),
            Err(
                WeightsError::SlotBusy { .. }
                | WeightsError::SlotBeingWritten { .. }
                | WeightsError::DuplicateName { .. },
            ) => Self::Refused,
            Err(other) => panic!("{other}"),
        }
    }
}

/// Three slots: `a` active, `b`, and an empty one.
pub(crate) struct World {
    pub(crate) memory: Arc<TestMemory>,
    pub(crate) weights: LoraWeights,
    /// The name that each (slot, generation) was ever seen with.
    seen: Mutex<HashMap<(u32, u64), String>>,
}

impl World {
    pub(crate) fn new() -> Self {
        let memory = TestMemory::new(1 << 30);
        let weights = LoraWeights::new(memory.clone(), tiny_model(), pool()).unwrap();
        let [a, b] = ["a", "b"].map(|name| {
            let (adapter, report) = adapter(name);
            adapter.input().with_report(report).unpinned()
        });
        weights.load(&[a, b]).unwrap();
        Self {
            memory,
            weights,
            seen: Mutex::default(),
        }
    }

    /// Holds what `request` asks for, and checks twice, other threads in between, that the device has that adapter under its slot.
    pub(crate) fn serve(&self, request: i32) -> Option<String> {
        let lease = self.weights.lease(request)?;
        let held = lease.adapter().expect("not the base model");
        let (slot, generation) = (held.slot(), held.generation());
        let name = held.name().to_owned();
        let mut seen = self.seen.lock().unwrap();
        let known = seen
            .entry((slot, generation))
            .or_insert_with(|| name.clone());
        assert_eq!(*known, name, "one generation, two adapters");
        drop(seen);
        for _ in 0..2 {
            self.check_device(slot, held);
            shuttle::thread::yield_now();
        }
        Some(name)
    }

    /// The slot's table entry and the first value behind it are the adapter's.
    fn check_device(&self, slot: u32, held: &AdapterSlot) {
        let pair = held.pair(0, LoraModule::QProj).expect("it adapts q");
        let route = self.weights.route(0, LoraModule::QProj).expect("a layer");
        let entry = self
            .memory
            .read(route.a_table.offset(8 * u64::from(slot)), 8);
        assert_eq!(u64::from_ne_bytes(entry.try_into().unwrap()), pair.a.0);
        let first = self.memory.read(pair.a, 2);
        let (adapter, _) = adapter(held.name());
        let wanted = adapter.store.tensor_bytes(lora_weights::TensorId(0));
        assert_eq!(
            first,
            wanted[..2],
            "{}: another adapter's bytes",
            held.name()
        );
    }

    pub(crate) fn swap(&self, slot: u32, name: &str) -> Result<Arc<AdapterSlot>, WeightsError> {
        self.bring_in(SlotTarget::Slot(slot), name)
    }

    /// Stages, begins and commits, each a step of its own.
    pub(crate) fn bring_in(
        &self,
        target: SlotTarget,
        name: &str,
    ) -> Result<Arc<AdapterSlot>, WeightsError> {
        let (adapter, report) = adapter(name);
        let staged = self.weights.stage(&adapter.input().with_report(report))?;
        staged.begin(target)?.commit()
    }

    pub(crate) fn name_in(&self, slot: u32) -> Option<String> {
        Some(self.weights.adapter(slot)?.name().to_owned())
    }

    pub(crate) fn assert_placeholder(&self, slot: u32) {
        assert!(self.weights.adapter(slot).is_none());
        let bytes = SlotBytes::read(&self.weights, &self.memory, slot);
        assert!(bytes.tables_are_zero(), "slot {slot} can still be reached");
    }

    /// What must hold once all threads have ended: no reference is left, and each slot is whole or a placeholder.
    pub(crate) fn check_at_rest(&self) {
        for slot in 0..3 {
            assert_eq!(self.weights.slot_ref_count(slot), Some(0));
            match self.name_in(slot) {
                Some(name) => assert_serves(&self.weights, &self.memory, slot, &adapter(&name).0),
                None => self.assert_placeholder(slot),
            }
        }
        let totals = self.memory.totals();
        assert_eq!(totals.in_flight, 0);
        assert!(
            totals.staging_buffers <= 1,
            "the pool keeps one idle buffer"
        );
    }
}
