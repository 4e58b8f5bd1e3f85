//! A source over a store that the engine has set up.

mod common;

use common::{SlotBytes, World, assert_serves};
use lora_weights::source::{AdapterSource, FetchProgress, SourceError, SourceOptions};
use lora_weights::{AdapterStore, LandingInput, SlotTarget, TensorId, WeightsError};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::path::PathBuf;
use std::sync::Arc;

fn case() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/cases/llama_plain/adapter")
}

fn put(store: &InMemory, path: &str, bytes: Vec<u8>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime
        .block_on(store.put(&Path::from(path), bytes.into()))
        .unwrap();
}

/// A store that holds an adapter at `loras/a`.
fn filled() -> Arc<InMemory> {
    let store = Arc::new(InMemory::new());
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        put(
            &store,
            &format!("loras/a/{file}"),
            std::fs::read(case().join(file)).unwrap(),
        );
    }
    store
}

fn source(store: &Arc<InMemory>, base: &str) -> AdapterSource {
    let options = SourceOptions {
        piece_bytes: 100,
        parallel: 5,
        ..SourceOptions::default()
    };
    let store: Arc<dyn ObjectStore> = Arc::clone(store) as _;
    AdapterSource::with_store(store, base, "mem://bucket/", options).unwrap()
}

#[test]
fn an_adapter_is_found_below_the_base_and_fetched_as_it_is() {
    let local = AdapterStore::open(&case()).unwrap();
    let store = filled();
    for (base, id) in [
        ("", "loras/a"),
        ("loras", "a"),
        ("loras/a", ""),
        ("/loras/", "a/"),
    ] {
        let remote = source(&store, base).adapter(id).unwrap();
        assert_eq!(remote.manifest().weights.tensors(), local.tensors());
        assert_eq!(remote.manifest().config_json, local.config_json());
        let fetched = remote.fetch(&|_: FetchProgress| {}).unwrap();
        for id in (0..local.tensors().len()).map(TensorId) {
            assert_eq!(fetched.tensor_bytes(id), local.tensor_bytes(id));
        }
    }
}

#[test]
fn an_object_that_is_replaced_after_its_header_was_read_is_not_mixed_with_its_successor() {
    let store = filled();
    let remote = source(&store, "loras").adapter("a").unwrap();
    let path = "loras/a/adapter_model.safetensors";
    let file = std::fs::read(case().join("adapter_model.safetensors")).unwrap();
    put(&store, path, file.clone());
    let error = remote.fetch(&|_| {}).unwrap_err();
    assert!(
        matches!(&error, SourceError::Changed { what: "ETag", tensor: Some(_), url, .. }
            if url == "mem://bucket/a/adapter_model.safetensors"),
        "{error}"
    );
    put(&store, path, [file, vec![0]].concat());
    let error = remote.fetch(&|_| {}).unwrap_err();
    assert!(
        matches!(&error, SourceError::Changed { what: "size", .. }),
        "{error}"
    );
}

#[test]
fn what_is_missing_is_named_with_what_is_there_instead() {
    let store = filled();
    let error = source(&store, "").adapter("loras/b").unwrap_err();
    assert_eq!(
        error.to_string(),
        "mem://bucket/loras/b/adapter_config.json: no such file; a PEFT adapter has one"
    );
    put(&store, "loras/b/adapter_config.json", b"{}".to_vec());
    put(&store, "loras/b/adapters.safetensors", b"x".to_vec());
    let error = source(&store, "").adapter("loras/b").unwrap_err();
    assert!(
        matches!(&error, SourceError::MissingWeights { instead: Some(file), .. } if file == "adapters.safetensors"),
        "{error}"
    );
    put(&store, "loras/b/adapter_config.json", vec![b'{', 0xff]);
    put(&store, "loras/b/adapter_model.safetensors", vec![0; 8]);
    let error = source(&store, "").adapter("loras/b").unwrap_err();
    assert!(
        matches!(error, SourceError::ConfigNotUtf8 { valid_up_to: 1, .. }),
        "{error}"
    );
    put(
        &store,
        "loras/b/adapter_config.json",
        vec![b' '; (16 << 20) + 1],
    );
    let error = source(&store, "").adapter("loras/b").unwrap_err();
    assert!(
        matches!(error, SourceError::ConfigTooLarge { limit, bytes, .. } if bytes == limit + 1),
        "{error}"
    );
}

#[test]
fn ids_do_not_climb_out_of_the_base() {
    let store = filled();
    for id in ["../a", "a/../../b", "a//b", "."] {
        let error = source(&store, "loras").adapter(id).unwrap_err();
        assert!(
            matches!(error, SourceError::BadLocation { .. }),
            "{id}: {error}"
        );
    }
}

/// The BF16 file that a store's tensors make.
fn file_of(store: &AdapterStore) -> Vec<u8> {
    let views = store.tensors().iter().enumerate().map(|(at, meta)| {
        let bytes = store.tensor_bytes(TensorId(at));
        let shape = meta.shape.clone();
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape, bytes);
        (meta.name.clone(), view.unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

#[test]
fn a_remote_adapter_lands_straight_in_staging_memory_or_no_slot_is_touched() {
    let World(memory, weights, resident, fresh) = &World::new();
    let store = Arc::new(InMemory::new());
    let path = "d/adapter_model.safetensors";
    put(
        &store,
        "d/adapter_config.json",
        fresh.store.config_json().into(),
    );
    put(&store, path, file_of(&fresh.store));
    let remote = source(&store, "").adapter("d").unwrap();
    let config = remote.manifest().config(&Default::default()).unwrap();
    let input = LandingInput::new("d", &remote.manifest().weights, &config);
    let land = || {
        weights.stage_landed(&input, |targets, image| {
            Ok(remote.land(targets, image, &|_| {})?)
        })
    };
    weights
        .pack_store_into_slot(SlotTarget::Slot(1), land().unwrap())
        .unwrap();
    assert_serves(weights, memory, 1, fresh);

    put(&store, path, file_of(&fresh.store));
    let before = SlotBytes::read_all(weights, memory);
    let WeightsError::Landing { source, .. } = land().unwrap_err() else {
        panic!("the object was replaced");
    };
    let source = source.downcast::<SourceError>().unwrap();
    assert!(
        matches!(*source, SourceError::Changed { what: "ETag", .. }),
        "{source}"
    );
    assert!(SlotBytes::read_all(weights, memory) == before);
    assert_serves(weights, memory, 2, &resident[2]);
}
