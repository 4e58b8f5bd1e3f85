//! Remote adapters in a runtime: they serve as local ones do, and are refused before they touch a slot.

use crate::{cases, id, remote, runtime, small_pieces};
use lora_runtime::RuntimeError;
use lora_runtime::weights::source::{AdapterSource, SourceError, fetch_adapter_manifest};
use lora_runtime::weights::{TensorId, WeightsError};
use lora_tests::case_dir;
use lora_tests::peer::Peer;
use std::sync::Mutex;

#[test]
fn a_fetched_adapter_is_the_local_one_to_the_bit_however_it_is_cut() {
    let peer = Peer::serving(&cases());
    for case in ["llama_plain", "llama_rslora", "llama_patterns"] {
        let lora = runtime(case);
        let seen = Mutex::new(Vec::new());
        let fetched = lora
            .fetch_adapter(
                "remote",
                &remote(&peer.address(), case, small_pieces()),
                &|progress| {
                    seen.lock().expect("one thread").push(progress);
                },
            )
            .expect("the peer is honest");
        let local = lora
            .adapter("local", &case_dir(case).join("adapter"))
            .expect("opens");
        assert_eq!(fetched.store().tensors(), local.store().tensors());
        for tensor in (0..fetched.store().tensors().len()).map(TensorId) {
            assert_eq!(
                fetched.store().tensor_bytes(tensor),
                local.store().tensor_bytes(tensor),
                "{case}"
            );
        }
        let seen = seen.into_inner().expect("one thread");
        let total = local.store().total_bytes();
        assert!(seen.len() > 3 && seen.is_sorted_by_key(|progress| progress.bytes));
        assert_eq!(
            seen.last().map(|p| (p.bytes, p.total)),
            Some((total, total))
        );
    }
    let data: Vec<_> = peer
        .sent()
        .into_iter()
        .filter(|sent| sent.range.len() > 256 && sent.path.ends_with("tensors"))
        .collect();
    let header = |sent: &lora_tests::peer::Sent| sent.range.start == 8;
    assert!(
        data.iter().all(header),
        "reads of data are 256 bytes at most, or one large tensor's part: {data:?}"
    );
}

#[test]
fn a_remote_adapter_is_promoted_swapped_and_serves() {
    let peer = Peer::serving(&cases());
    let lora = runtime("llama_plain");
    let startup = lora
        .adapter("startup", &case_dir("llama_patterns").join("adapter"))
        .expect("opens");
    lora.load(&[startup]).expect("loads");
    let fetch = |name: &str, case| {
        lora.fetch_adapter(
            name,
            &remote(&peer.address(), case, small_pieces()),
            &|_| {},
        )
    };
    let promoted = lora
        .promote(&fetch("a", "llama_plain").expect("is honest"))
        .expect("a slot is free");
    assert_eq!((promoted.slot(), promoted.name()), (1, "a"));
    let key = lora.adapter_id(1);
    let swapped = lora
        .swap(1, &fetch("a", "llama_rslora").expect("is honest"))
        .expect("nobody holds it");
    assert_eq!(
        (swapped.name(), swapped.generation()),
        ("a", promoted.generation() + 1)
    );
    assert_ne!(lora.adapter_id(1), key);
    let local = lora
        .adapter("b", &case_dir("llama_rslora").join("adapter"))
        .expect("opens");
    let beside = lora.promote(&local).expect("a slot is free");
    let (one, other) = (swapped.report(), beside.report());
    assert!(one.values_read && one.pairs == other.pairs);
}

#[test]
fn a_remote_nan_is_found_on_the_bytes_that_came_and_the_slot_goes_on() {
    let peer = Peer::serving(&cases());
    let lora = runtime("llama_plain");
    let good = lora
        .adapter("good", &case_dir("llama_plain").join("adapter"))
        .expect("opens");
    lora.load(&[good]).expect("loads");
    let before = lora.adapter_id(0);
    // The header is as good as any.
    let bad = remote(&peer.address(), "bad_nan", small_pieces());
    assert!(lora.audit_remote(&bad).ok());
    let fetched = lora
        .fetch_adapter("good", &bad, &|_| {})
        .expect("it can be fetched");
    let refused = lora.swap(0, &fetched).expect_err("holds a NaN");
    let RuntimeError::Weights(WeightsError::Refused { report, .. }) = &refused else {
        panic!("{refused}");
    };
    assert_eq!(
        report.errors().next().map(|f| f.reason.as_str()),
        Some("non-finite-weights")
    );
    assert_eq!(lora.adapter_id(0), before);
    assert_eq!(lora.weights().adapter_names()[0].as_deref(), Some("good"));
}

#[test]
fn what_the_header_already_refuses_is_not_asked_for() {
    let peer = Peer::serving(&cases());
    let lora = runtime("llama_plain");
    let wrong = remote(&peer.address(), "bad_b_transposed", small_pieces());
    let asked = peer.sent().len();
    let refused = lora
        .fetch_adapter("a", &wrong, &|_| {})
        .expect_err("B is transposed");
    assert!(
        matches!(refused, RuntimeError::Weights(WeightsError::Refused { .. })),
        "{refused}"
    );
    assert_eq!(peer.sent().len(), asked, "no data was asked for");
    assert!(
        lora.metrics()
            .refusal_reasons
            .contains_key("shape-mismatch")
    );
}

#[test]
fn a_manifest_brings_rank_and_scale_along() {
    let peer = Peer::serving(&cases());
    let manifest = fetch_adapter_manifest(&peer.address(), &id("llama_rslora")).expect("is there");
    assert_eq!(manifest.location, peer.url(&id("llama_rslora")));
    let config = manifest.config(&Default::default()).expect("a good config");
    let local =
        lora_runtime::weights::AdapterStore::open(&case_dir("llama_rslora").join("adapter"))
            .expect("opens");
    assert_eq!(manifest.weights.tensors(), local.tensors());
    assert!(config.r() > 0);
    assert!(matches!(
        fetch_adapter_manifest(&peer.address(), "../llama_rslora/adapter"),
        Err(SourceError::BadLocation { .. })
    ));
}

#[test]
fn a_source_may_be_read_from_within_an_engines_own_runtime() {
    let peer = Peer::serving(&cases());
    let engine = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime");
    let tensors = engine.block_on(async {
        let adapter = remote(&peer.address(), "llama_plain", small_pieces());
        adapter
            .fetch(&|_| {})
            .expect("the peer is honest")
            .tensors()
            .len()
    });
    assert_eq!(tensors, 28);
}

#[test]
fn a_landed_adapter_serves_as_the_one_it_was_made_of_and_f32_is_refused() {
    use lora_runtime::weights::{AdapterStore, SlotTarget};
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;
    let lora = runtime("llama_plain");
    let local = lora
        .adapter("local", &case_dir("llama_plain").join("adapter"))
        .expect("opens");
    // The same adapter, rounded to BF16 as packing rounds it.
    let round = |store: &AdapterStore, at: usize| -> Vec<u8> {
        let meta = &store.tensors()[at];
        let mut values = vec![half::bf16::ZERO; meta.shape.iter().product()];
        store.read_rows_bf16(TensorId(at), 0..meta.shape[0], &mut values, meta.shape[1]);
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    };
    let store = local.store();
    let rounded: Vec<_> = (0..store.tensors().len())
        .map(|at| round(store, at))
        .collect();
    let views = store.tensors().iter().zip(&rounded).map(|(meta, bytes)| {
        (
            &meta.name,
            TensorView::new(Dtype::BF16, meta.shape.clone(), bytes).expect("sizes agree"),
        )
    });
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(
        folder.path().join("adapter_config.json"),
        store.config_json(),
    )
    .expect("is written");
    safetensors::serialize_to_file(
        views,
        None,
        &folder.path().join("adapter_model.safetensors"),
    )
    .expect("is written");
    let peer = Peer::serving(folder.path());
    let source = AdapterSource::open(&peer.address(), small_pieces()).expect("a location");
    let bf16 = source.adapter("").expect("is there");
    let landed = lora
        .land(
            "landed",
            bf16.manifest(),
            SlotTarget::Victim,
            |targets, image| Ok(bf16.land(targets, image, &|_| {})?),
        )
        .expect("the peer is honest");
    let packed = lora.promote(&local).expect("a slot is free");
    let image = |slot: u32| {
        let mut bytes = vec![0; lora.weights().layout().bytes().slot as usize];
        let base = lora.weights().slot_base(slot).expect("in range");
        lora.kernels()
            .backend()
            .download(base, &mut bytes)
            .expect("is there");
        bytes
    };
    assert_eq!((landed.slot(), packed.slot()), (0, 1));
    assert!(image(0) == image(1), "landing and packing give one image");
    assert_eq!(lora.metrics().loads, 2);

    let cases = Peer::serving(&cases());
    let f32s = remote(&cases.address(), "llama_plain", small_pieces());
    let refused = lora.land("f32", f32s.manifest(), SlotTarget::Victim, |_, _| {
        panic!("is not asked")
    });
    assert!(
        refused
            .expect_err("F32 has to be rounded")
            .to_string()
            .contains("REJECT[landing-geometry]")
    );
}
