//! Peers that fail: each a typed error that names URL, tensor and numbers, and nothing else is touched.

use crate::{cases, id, remote, runtime};
use lora_runtime::RuntimeError;
use lora_runtime::weights::source::{AdapterSource, SourceError, SourceOptions};
use lora_tests::faulty::{Fault, FaultyPeer};
use lora_tests::{case_dir, lora};
use std::path::Path;
use std::time::{Duration, Instant};

const CASE: &str = "llama_plain";

/// Short where the fault is to be slow; else long enough for a machine that is busy with other things.
fn seconds(fault: Fault) -> u64 {
    match fault {
        Fault::Silent | Fault::Drips => 3,
        _ => 30,
    }
}

fn waiting(seconds: u64) -> SourceOptions {
    SourceOptions {
        timeout: Duration::from_secs(seconds),
        piece_bytes: 2048,
        retries: 1,
        ..SourceOptions::default()
    }
}

/// Whether the error is the one that the fault is to give, with its numbers.
fn is_right(fault: Fault, error: &SourceError) -> bool {
    let file = std::fs::metadata(case_dir(CASE).join("adapter/adapter_model.safetensors"));
    let size = file.expect("is there").len();
    match error {
        SourceError::Timeout { received, .. } if fault == Fault::Silent => *received == 0,
        SourceError::Timeout {
            received, range, ..
        } if fault == Fault::Drips => 0 < *received && *received < range.end - range.start,
        SourceError::Length {
            received, range, ..
        } if fault == Fault::Short => *received + 3 == range.end - range.start,
        SourceError::Length {
            received, range, ..
        } if fault == Fault::Long => *received > range.end - range.start,
        SourceError::Changed {
            what,
            expected,
            found,
            ..
        } if fault == Fault::NewTag => {
            (*what, expected.as_str(), found.as_str()) == ("ETag", "\"first\"", "\"second\"")
        }
        SourceError::Changed {
            what,
            expected,
            found,
            ..
        } if fault == Fault::NewSize => {
            (*what, expected, found) == ("size", &size.to_string(), &(size + 8).to_string())
        }
        SourceError::Read { range, .. } => {
            let by_store = [
                Fault::Dies,
                Fault::OtherRange,
                Fault::IgnoresRange,
                Fault::Busy,
            ];
            by_store.contains(&fault) && range.end > range.start
        }
        _ => false,
    }
}

#[test]
fn every_fault_is_a_typed_error_in_time_and_no_slot_is_touched() {
    let lora = runtime(CASE);
    let resident = lora
        .adapter("resident", &case_dir(CASE).join("adapter"))
        .expect("opens");
    lora.load(&[resident]).expect("loads");
    let state = || {
        (
            lora.weights().adapter_names(),
            lora.adapter_id(0),
            lora.weights().expert_units(),
        )
    };
    let before = state();
    for fault in Fault::ALL {
        let peer = FaultyPeer::serving(&cases(), fault);
        let bad = remote(&peer.url(""), CASE, waiting(seconds(fault)));
        let begin = Instant::now();
        let error = lora
            .fetch_adapter("resident", &bad, &|_| {})
            .expect_err("the peer fails");
        assert!(
            begin.elapsed() < Duration::from_secs(15),
            "{fault:?} took {:?}",
            begin.elapsed()
        );
        let RuntimeError::Source { adapter, source } = &error else {
            panic!("{fault:?}: {error}");
        };
        assert!(
            adapter == "resident" && is_right(fault, source),
            "{fault:?}: {source:?}"
        );
        let text = source.to_string();
        let url = format!("{}/adapter_model.safetensors", peer.url(&id(CASE)));
        let tensor = source
            .tensor()
            .unwrap_or_else(|| panic!("{fault:?}: {text}"));
        assert!(
            text.starts_with(&url) && text.contains(tensor),
            "{fault:?}: {text}"
        );
        assert_eq!(source.reason(), "source-failed");
        assert_eq!(state(), before, "{fault:?}");
    }
    // Slots are as usable as before.
    let again = lora
        .adapter("resident", &case_dir(CASE).join("adapter"))
        .expect("opens");
    assert_eq!(
        lora.swap(0, &again).expect("nobody holds it").generation(),
        1
    );
}

#[test]
fn the_command_names_what_a_peer_did_and_exits_with_one() {
    let model = case_dir(CASE).join("config.json").display().to_string();
    for fault in Fault::ALL {
        let peer = FaultyPeer::serving(&cases(), fault);
        let url = peer.url(&id(CASE));
        let timeout = seconds(fault).to_string();
        let arguments = [
            "audit",
            "--json",
            "--model",
            &model,
            &url,
            "--timeout",
            &timeout,
        ];
        assert_eq!(
            lora(&arguments).code,
            0,
            "{fault:?}: the header is all right"
        );
        let output = lora(&[&arguments[..], &["--fetch"]].concat());
        assert_eq!(
            (output.code, output.error_reasons()),
            (1, vec!["source-failed".to_owned()]),
            "{fault:?}"
        );
        let json = output.json();
        assert!(
            json["findings"][0]["tensor"].is_string(),
            "{fault:?}: {}",
            output.out
        );
        let message = json["findings"][0]["message"].as_str().expect("a string");
        assert!(message.starts_with(&url), "{fault:?}: {message}");
    }
}

/// A peer whose weights file begins with `bytes`.
fn adapter_of(folder: &Path, bytes: &[u8]) {
    let config = case_dir(CASE).join("adapter/adapter_config.json");
    std::fs::copy(config, folder.join("adapter_config.json")).expect("is copied");
    std::fs::write(folder.join("adapter_model.safetensors"), bytes).expect("is written");
}

#[test]
fn a_header_that_lies_is_refused_before_anything_of_its_size_is_allocated() {
    let lies: [(&str, Vec<u8>); 4] = [
        (
            "a length over the format's limit",
            u64::MAX.to_le_bytes().to_vec(),
        ),
        (
            "a length past the end",
            [&1000u64.to_le_bytes()[..], b"{}"].concat(),
        ),
        ("no length", vec![1, 2, 3]),
        ("data past the end", {
            let header = br#"{"x":{"dtype":"BF16","shape":[1099511627776],"data_offsets":[0,2199023255552]}}"#;
            [&(header.len() as u64).to_le_bytes()[..], header].concat()
        }),
    ];
    for (what, bytes) in lies {
        let folder = tempfile::tempdir().expect("a temporary folder");
        adapter_of(folder.path(), &bytes);
        let peer = lora_tests::peer::Peer::serving(folder.path());
        let source = AdapterSource::open(&peer.address(), waiting(30)).expect("a location");
        let error = source.adapter("").expect_err(what);
        assert!(
            matches!(error, SourceError::Header { .. }),
            "{what}: {error}"
        );
        assert_eq!(error.reason(), "bad-file", "{what}");
    }
}

#[test]
fn a_file_over_the_limit_is_not_asked_for() {
    let peer = lora_tests::peer::Peer::serving(&cases());
    let options = SourceOptions {
        max_file_bytes: 1000,
        ..waiting(30)
    };
    let source = AdapterSource::open(&peer.address(), options).expect("a location");
    let error = source.adapter(&id(CASE)).expect_err("it is larger");
    assert!(
        matches!(error, SourceError::TooLarge { limit: 1000, bytes, .. } if bytes > 1000),
        "{error}"
    );
}
