//! What a slot owns beside pool and expert units.

mod common;

use common::{GIB, Recorder, TestMemory, World, assert_placeholder, pool, tiny_model};
use lora_config::{AdapterConfig, parse_peft_adapter_config};
use lora_weights::{
    AdapterSlot, AdapterStore, LoraAdapterInput, LoraWeights, MemoryTensor, ModuleSet,
    SlotExtension, SlotTarget, Unloaded, WeightsError,
};
use parking_lot::Mutex;
use std::sync::Arc;

/// An adapter of a whole embedding table and nothing else.
struct Tokens {
    store: AdapterStore,
    config: AdapterConfig,
}

impl Tokens {
    fn new() -> Self {
        let json = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": false, "target_modules": [],
            "modules_to_save": ["embed_tokens"]}"#;
        let name = "base_model.model.model.embed_tokens.weight";
        let table = MemoryTensor::from_f32(name, [48, 32], &[0.5; 48 * 32]);
        Self {
            store: AdapterStore::from_tensors(json, [table]).unwrap(),
            config: parse_peft_adapter_config(json, &Default::default()).unwrap(),
        }
    }

    fn input(&self) -> LoraAdapterInput<'_> {
        LoraAdapterInput::new("t", &self.store, &self.config)
    }
}

#[test]
fn an_extension_lives_and_dies_with_its_slot() {
    let World(_, weights, resident, fresh) = &World::new();
    let (first, log) = Recorder::new("first", false);
    let mut begun = weights
        .stage(&fresh.input())
        .unwrap()
        .begin(SlotTarget::Slot(3))
        .unwrap();
    begun.attach(first);
    assert!(log.lock().is_empty(), "installed at commit");
    begun.commit().unwrap();
    assert_eq!(*log.lock(), ["first install 3"]);
    assert_eq!(weights.extensions(3).len(), 1);

    weights.swap(3, &resident[1].named("e")).unwrap();
    assert_eq!(
        *log.lock(),
        ["first install 3", "first uninstall 3", "first drop"]
    );
    assert!(weights.extensions(3).is_empty());
}

/// Recorders of these names, all writing into one log.
fn recorders<const N: usize>(
    names: [&'static str; N],
    failing: &str,
) -> ([Arc<Recorder>; N], Arc<Mutex<Vec<String>>>) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let recorder = |name| Recorder {
        name,
        log: Arc::clone(&log),
        fails: name == failing,
    };
    (names.map(|name| Arc::new(recorder(name))), log)
}

#[test]
fn extensions_are_installed_in_order_and_uninstalled_in_reverse() {
    let World(_, weights, _, fresh) = &World::new();
    let ([given, attached, late], log) = recorders(["given", "attached", "late"], "");
    let input = fresh.input().with_extension(given);
    let mut begun = weights
        .stage(&input)
        .unwrap()
        .begin(SlotTarget::Slot(3))
        .unwrap();
    begun.attach(attached);
    let generation = begun.commit().unwrap().generation();
    weights.attach_extension(3, generation, late).unwrap();
    drop(input);
    let installed = ["given install 3", "attached install 3", "late install 3"];
    assert_eq!(*log.lock(), installed);
    assert_eq!(weights.extensions(3).len(), 3);

    log.lock().clear();
    let Unloaded::Freed(freed) = weights.unload(3).unwrap() else {
        panic!("nobody holds it");
    };
    assert_eq!(freed.extension_bytes, 3 * 7);
    let gone = [
        "late uninstall 3",
        "late drop",
        "attached uninstall 3",
        "attached drop",
        "given uninstall 3",
        "given drop",
    ];
    assert_eq!(*log.lock(), gone);
}

#[test]
fn what_was_installed_before_a_failing_extension_is_uninstalled_and_nothing_after_it() {
    let World(memory, weights, _, fresh) = &World::new();
    let ([first, second, third], log) = recorders(["first", "second", "third"], "second");
    let input = fresh.input().with_extension(first);
    let mut begun = weights
        .stage(&input)
        .unwrap()
        .begin(SlotTarget::Slot(1))
        .unwrap();
    drop(input);
    begun.attach(second);
    begun.attach(third);
    assert!(matches!(
        begun.commit(),
        Err(WeightsError::Extension { slot: 1, .. })
    ));
    assert_placeholder(weights, memory, 1);
    let died = [
        "first install 1",
        "second install 1",
        "third drop",
        "second uninstall 1",
        "second drop",
        "first uninstall 1",
        "first drop",
    ];
    assert_eq!(*log.lock(), died);
}

#[test]
fn an_extension_that_applies_no_vocabulary_rows_does_not_make_an_adapter_whole() {
    let mut spec = pool(2);
    spec.policy.overlays = true;
    let weights = LoraWeights::new(TestMemory::new(GIB), tiny_model(), spec).unwrap();
    let tokens = Tokens::new();
    let (tables, log) = Recorder::new("tables", false);
    let input = tokens.input().with_extension(tables);
    assert!(matches!(
        weights.promote(&input),
        Err(WeightsError::OverlayWithoutExtension { .. })
    ));
    assert!(log.lock().is_empty(), "refused before any write");
    let (overlay, _) = Recorder::new("overlay", false);
    weights.promote(&input.with_extension(overlay)).unwrap();
}

#[test]
fn an_extension_that_cannot_be_installed_takes_its_adapter_with_it() {
    let World(memory, weights, _, fresh) = &World::new();
    let (failing, log) = Recorder::new("overlay", true);
    let mut begun = weights
        .stage(&fresh.input())
        .unwrap()
        .begin(SlotTarget::Slot(1))
        .unwrap();
    begun.attach(failing);
    assert!(matches!(
        begun.commit(),
        Err(WeightsError::Extension { slot: 1, .. })
    ));
    assert_placeholder(weights, memory, 1);
    let died = ["overlay install 1", "overlay uninstall 1", "overlay drop"];
    assert_eq!(*log.lock(), died);

    let (failing, log) = Recorder::new("overlay", true);
    assert!(matches!(
        weights.attach_extension(2, 0, failing),
        Err(WeightsError::Extension { slot: 2, .. })
    ));
    assert_placeholder(weights, memory, 2);
    assert_eq!(log.lock().len(), 3);
}

#[test]
fn an_extension_for_contents_that_are_gone_is_refused() {
    let World(_, weights, _, fresh) = &World::new();
    weights.swap(1, &fresh.input()).unwrap();
    let (late, log) = Recorder::new("late", false);
    assert!(matches!(
        weights.attach_extension(1, 0, late),
        Err(WeightsError::GenerationChanged {
            slot: 1,
            expected: 0,
            found: 1
        })
    ));
    assert_eq!(*log.lock(), ["late drop"]);
    assert_eq!(weights.adapter(1).unwrap().name(), "d");
}

#[test]
fn an_adapter_with_vocabulary_rows_needs_the_extension_that_applies_them() {
    let model = tiny_model();
    let mut spec = pool(2);
    spec.policy.overlays = true;
    let tokens = Tokens::new();
    let input = tokens.input();
    let memory = TestMemory::new(GIB);
    let weights = LoraWeights::new(memory.clone(), model, spec).unwrap();
    let missing = |result: Result<(), WeightsError>| {
        let error = result.unwrap_err();
        assert!(
            error.to_string().starts_with("REJECT[overlay-unapplied]"),
            "{error}"
        );
    };
    let uploads = memory.totals().uploads;
    missing(weights.load(std::slice::from_ref(&input)).map(drop));
    missing(weights.promote(&input).map(drop));
    missing(weights.swap(1, &input).map(drop));
    assert_eq!(memory.totals().uploads, uploads, "refused before any write");

    let begin = || {
        let staged = weights.stage(&input).unwrap();
        staged.begin(SlotTarget::Slot(1)).unwrap()
    };
    missing(begin().commit().map(drop));
    assert_placeholder(&weights, &memory, 1);

    let log = Arc::new(Mutex::new(Vec::new()));
    let overlay = || {
        Arc::new(Recorder {
            name: "overlay",
            log: Arc::clone(&log),
            fails: false,
        })
    };
    let mut begun = begin();
    begun.attach(overlay());
    begun.commit().unwrap();
    weights
        .swap(1, &input.clone().with_extension(overlay()))
        .unwrap();
    assert_eq!(log.lock().len(), 4, "installed, replaced, installed");
}

#[test]
fn an_extension_that_panics_leaves_a_placeholder() {
    struct Panics;
    impl SlotExtension for Panics {
        fn install(&self, _: &AdapterSlot) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            panic!("no room");
        }
        fn uninstall(&self, _: u32) {}
    }
    let World(memory, weights, _, fresh) = &World::new();
    let input = fresh.input().with_extension(Arc::new(Panics));
    let swap = std::panic::AssertUnwindSafe(|| weights.swap(1, &input).map(drop));
    assert!(std::panic::catch_unwind(swap).is_err());
    assert_placeholder(weights, memory, 1);
    weights.swap(1, &fresh.input()).unwrap();
}

#[test]
fn a_pool_without_modules_serves_vocabulary_rows_alone() {
    let mut spec = pool(2);
    spec.modules = ModuleSet::EMPTY;
    spec.experts = None;
    spec.policy.overlays = true;
    let memory = TestMemory::new(GIB);
    let weights = LoraWeights::new(memory.clone(), tiny_model(), spec).unwrap();
    assert_eq!(weights.layout().bytes().total(), 0);
    let tokens = Tokens::new();
    let (overlay, log) = Recorder::new("overlay", false);
    weights
        .promote(&tokens.input().with_extension(overlay))
        .unwrap();
    assert_eq!(weights.slot_of("t"), Some(0));
    weights.unload(0).unwrap();
    let died = ["overlay install 0", "overlay uninstall 0", "overlay drop"];
    assert_eq!(*log.lock(), died);
}
