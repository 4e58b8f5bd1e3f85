use super::memory::TestMemory;
use lora_weights::device::LoraRoute;
use lora_weights::{
    AdapterSlot, LoraWeights, PackSource, SlotExtension, image_bytes, pack_adapter,
};
use parking_lot::Mutex;
use std::error::Error;
use std::sync::Arc;

use super::adapters::Adapter;

/// Everything the device holds of one slot: its bytes, and its entries (A, B, scale, rank) in every table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotBytes {
    pub slot: Vec<u8>,
    pub tables: Vec<[Vec<u8>; 4]>,
}

impl SlotBytes {
    pub fn read(weights: &LoraWeights, memory: &TestMemory, slot: u32) -> Self {
        let bytes = weights.layout().bytes().slot as usize;
        Self {
            slot: memory.read(weights.slot_base(slot).unwrap(), bytes),
            tables: routes(weights)
                .iter()
                .map(|route| entries(route, memory, slot))
                .collect(),
        }
    }

    /// All slots.
    pub fn read_all(weights: &LoraWeights, memory: &TestMemory) -> Vec<Self> {
        (0..weights.layout().slots())
            .map(|slot| Self::read(weights, memory, slot))
            .collect()
    }

    pub fn tables_are_zero(&self) -> bool {
        self.tables
            .iter()
            .flatten()
            .flatten()
            .all(|byte| *byte == 0)
    }
}

/// Every route of the pool: modules, then routers.
fn routes(weights: &LoraWeights) -> Vec<LoraRoute> {
    let layout = weights.layout();
    let modules = layout
        .regions()
        .iter()
        .map(|region| weights.route(region.layer, region.module).unwrap());
    let routers = (0..layout.layers()).filter_map(|layer| weights.router_route(layer));
    modules.chain(routers).collect()
}

fn entries(route: &LoraRoute, memory: &TestMemory, slot: u32) -> [Vec<u8>; 4] {
    let tables = [
        (route.a_table, 8),
        (route.b_table, 8),
        (route.scale_table, 4),
        (route.rank_table, 4),
    ];
    tables.map(|(table, width)| memory.read(table.offset(u64::from(slot) * width), width as usize))
}

/// Fails unless the slot holds nothing that a request or a launch could reach.
#[track_caller]
pub fn assert_placeholder(weights: &LoraWeights, memory: &TestMemory, slot: u32) {
    assert!(weights.adapter(slot).is_none());
    assert_eq!(weights.acquire_slot(slot as i32), -1);
    assert_eq!(weights.slot_ref_count(slot), Some(0));
    assert_eq!(weights.adapter_id_for_slot(slot as i32), 0);
    assert!(weights.extensions(slot).is_empty());
    assert!(SlotBytes::read(weights, memory, slot).tables_are_zero());
}

/// Fails unless the slot's bytes, units and table entries are those of `adapter`, to the bit.
#[track_caller]
pub fn assert_serves(weights: &LoraWeights, memory: &TestMemory, slot: u32, adapter: &Adapter) {
    let held = weights.adapter(slot).expect("a filled slot");
    let report = weights.audit(&adapter.input());
    let layout = weights.layout();
    let mut image = vec![bf16_zero(); image_bytes(layout, &report.pairs).unwrap() / 2];
    let source = PackSource {
        store: &adapter.store,
        pairs: &report.pairs,
    };
    pack_adapter(source, layout, bytemuck::cast_slice_mut(&mut image)).unwrap();
    let image: &[u8] = bytemuck::cast_slice(&image);

    let found = SlotBytes::read(weights, memory, slot);
    let (dense, mut units) = image.split_at(layout.bytes().slot as usize);
    assert!(found.slot == dense, "slot {slot} has other bytes");

    let mut expected = Vec::new();
    for region in layout.regions() {
        expected.push(held.pair(region.layer, region.module));
    }
    for (layer, experts) in held.experts().iter().enumerate() {
        if layout.router_table(layer).is_some() {
            expected.push(experts.router());
        }
        let pairs = experts.router().into_iter();
        for pair in pairs.chain(experts.pairs().map(|(_, _, pair)| pair)) {
            let unit;
            (unit, units) = units.split_at(layout.bytes().expert_unit as usize);
            assert!(
                memory.read(pair.a, unit.len()) == unit,
                "a unit has other bytes"
            );
        }
    }
    assert!(units.is_empty());
    for (entry, pair) in found.tables.iter().zip(&expected) {
        let wanted = pair.map_or([0u64, 0, 0, 0], |pair| {
            [
                pair.a.0,
                pair.b.0,
                pair.scale.to_bits().into(),
                pair.rank.into(),
            ]
        });
        let number = |bytes: &Vec<u8>| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        };
        assert_eq!([0, 1, 2, 3].map(|kind| number(&entry[kind])), wanted);
    }
    assert_eq!(found.tables.len(), expected.len());
}

fn bf16_zero() -> half::bf16 {
    half::bf16::ZERO
}

/// An extension that writes down what becomes of it. One named `overlay` says that it applies vocabulary rows.
pub struct Recorder {
    pub name: &'static str,
    pub log: Arc<Mutex<Vec<String>>>,
    pub fails: bool,
}

impl Recorder {
    /// An extension and what it writes down.
    pub fn new(name: &'static str, fails: bool) -> (Arc<Self>, Arc<Mutex<Vec<String>>>) {
        let log = Arc::new(Mutex::new(Vec::new()));
        let recorder = Self {
            name,
            log: Arc::clone(&log),
            fails,
        };
        (Arc::new(recorder), log)
    }

    fn note(&self, what: &str) {
        self.log.lock().push(format!("{} {what}", self.name));
    }
}

impl SlotExtension for Recorder {
    fn install(&self, adapter: &AdapterSlot) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.note(&format!("install {}", adapter.slot()));
        if self.fails {
            return Err("no room".into());
        }
        Ok(())
    }

    fn uninstall(&self, slot: u32) {
        self.note(&format!("uninstall {slot}"));
    }

    fn device_bytes(&self) -> u64 {
        7
    }

    fn applies_overlays(&self) -> bool {
        self.name == "overlay"
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.note("drop");
    }
}
