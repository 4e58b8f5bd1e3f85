use super::*;
use proptest::prelude::*;
use std::fs;

/// A file of this header and data, with the header's length before it.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn folder(weights: Option<&[u8]>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("adapter_config.json"), "{}").unwrap();
    if let Some(bytes) = weights {
        fs::write(dir.path().join("adapter_model.safetensors"), bytes).unwrap();
    }
    dir
}

fn header_error(header: &str, data_bytes: u64) -> HeaderError {
    parse_safetensors_header(header.as_bytes(), data_bytes).unwrap_err()
}

fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
}

#[test]
fn values_come_out_as_they_went_in_at_any_alignment() {
    for pad in 0..4 {
        let header = format!(
            r#"{{"x":{{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}}}{}"#,
            " ".repeat(pad)
        );
        let data: Vec<u8> = [1.0f32, -2.0, 3.0, 0.5]
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect();
        let dir = folder(Some(&file(&header, &data)));
        let store = AdapterStore::open(dir.path()).unwrap();
        let mut out = [bf16::ZERO; 6];
        store.read_rows_bf16(TensorId(0), 0..2, &mut out, 4);
        let got: Vec<f32> = out.iter().map(|v| v.to_f32()).collect();
        assert_eq!(got, [1.0, -2.0, 0.0, 0.0, 3.0, 0.5]);
        assert_eq!(store.total_bytes(), 16);
        assert_eq!(store.config_json(), "{}");
    }
}

#[test]
fn tensors_keep_the_order_of_the_header() {
    let header = r#"{"b":{"dtype":"I8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]},
        "__metadata__":{"format":"pt"}}"#;
    let entries = parse_safetensors_header(header.as_bytes(), 2).unwrap();
    let names: Vec<_> = entries
        .iter()
        .map(|e| (e.meta.name.as_str(), e.meta.dtype.to_string()))
        .collect();
    assert_eq!(names, [("b", "I8".to_owned()), ("a", "F8_E4M3".to_owned())]);
}

#[test]
fn a_damaged_header_is_refused_by_what_is_wrong() {
    use HeaderError as E;
    let two = |a: &str, b: &str| {
        format!(
            r#"{{"x":{{"dtype":"I8","shape":[4],"data_offsets":{a}}},"y":{{"dtype":"I8","shape":[4],"data_offsets":{b}}}}}"#
        )
    };
    assert!(matches!(header_error("", 0), E::NotJson { .. }));
    assert!(matches!(header_error(" {}", 0), E::NotJson { .. }));
    assert!(matches!(header_error("[]", 0), E::NotJson { .. }));
    assert!(matches!(header_error("{", 0), E::NotJson { .. }));
    assert!(matches!(header_error("{} x", 0), E::NotJson { .. }));
    assert!(matches!(header_error(r#"{"x":1}"#, 0), E::BadEntry { tensor, .. } if tensor == "x"));
    assert!(matches!(
        header_error(&entry("F32", "[-1]", "[0,4]"), 4),
        E::BadEntry { .. }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[1.5]", "[0,4]"), 4),
        E::BadEntry { .. }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4),
        E::BadEntry { .. }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[1]", "[0,4],\"scale\":2"), 4),
        E::BadEntry { .. }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[1]", "[0,4],\"dtype\":\"F16\""), 4),
        E::BadEntry { .. }
    ));
    assert!(matches!(
        header_error(&entry("F4", "[1]", "[0,1]"), 1),
        E::BadEntry { .. }
    ));
    assert!(matches!(
        header_error(&entry("F12", "[1]", "[0,4]"), 4),
        E::UnknownDtype { .. }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[9223372036854775807,9]", "[0,4]"), 4),
        E::SizeOverflow { .. }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[2]", "[0,4]"), 4),
        E::SizeMismatch {
            expected: 8,
            actual: 4,
            ..
        }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[1]", "[4,0]"), 4),
        E::Reversed { .. }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[1]", "[0,4]"), 3),
        E::DataPastEnd {
            end: 4,
            available: 3,
            ..
        }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[1]", "[0,4]"), 6),
        E::TrailingBytes { bytes: 2 }
    ));
    assert!(matches!(
        header_error(&entry("F32", "[1]", "[4,8]"), 8),
        E::Hole {
            begin: 4,
            bytes: 4,
            ..
        }
    ));
    assert!(matches!(
        header_error(&two("[0,4]", "[3,7]"), 8),
        E::Overlap { begin: 3, .. }
    ));
    assert!(matches!(
        header_error(&two("[0,4]", "[5,9]"), 9),
        E::Hole { bytes: 1, .. }
    ));
    let twice = two("[0,4]", "[4,8]").replace("\"y\"", "\"x\"");
    assert!(matches!(header_error(&twice, 8), E::DuplicateName { tensor } if tensor == "x"));
    let metadata = r#"{"__metadata__":{},"__metadata__":{}}"#;
    assert!(matches!(header_error(metadata, 0), E::BadEntry { .. }));
    let metadata = r#"{"__metadata__":{"format":7}}"#;
    assert!(matches!(header_error(metadata, 0), E::BadEntry { .. }));
}

#[test]
fn a_damaged_file_is_refused_by_what_is_wrong() {
    use HeaderError as E;
    type Wanted = fn(&E) -> bool;
    let cases: [(Vec<u8>, Wanted); 5] = [
        (vec![], |e| matches!(e, E::TooShort { bytes: 0 })),
        (vec![2, 0, 0], |e| matches!(e, E::TooShort { bytes: 3 })),
        (u64::MAX.to_le_bytes().to_vec(), |e| {
            matches!(e, E::TooLarge { .. })
        }),
        (100_000_000u64.to_le_bytes().to_vec(), |e| {
            matches!(e, E::PastEnd { available: 0, .. })
        }),
        (file("{}", b"x"), |e| {
            matches!(e, E::TrailingBytes { bytes: 1 })
        }),
    ];
    for (bytes, wanted) in cases {
        let dir = folder(Some(&bytes));
        match AdapterStore::open(dir.path()) {
            Err(StoreError::Header { source, .. }) => assert!(wanted(&source), "{source}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_folder_without_weights_says_what_is_there_instead() {
    let open = |name: Option<&str>| {
        let dir = folder(None);
        if let Some(name) = name {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        AdapterStore::open(dir.path()).unwrap_err()
    };
    assert!(matches!(open(None), StoreError::MissingWeights { .. }));
    assert!(matches!(
        open(Some("adapter_model.bin")),
        StoreError::Pickle { .. }
    ));
    assert!(matches!(
        open(Some("adapter_model.safetensors.index.json")),
        StoreError::Sharded { .. }
    ));
    assert!(matches!(
        open(Some("adapters.safetensors")),
        StoreError::Mlx { .. }
    ));
    for error in [open(None), open(Some("adapter_model.bin"))] {
        assert_eq!(error.reason(), "missing-weights-file");
    }
}

#[test]
fn a_folder_that_is_no_adapter_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &Path| AdapterStore::open(path).unwrap_err();
    assert!(matches!(
        open(&dir.path().join("x")),
        StoreError::NotAFolder { .. }
    ));
    assert!(matches!(open(dir.path()), StoreError::MissingConfig { .. }));
    for name in ["b", "a"] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("adapter_config.json"), "{}").unwrap();
    }
    match open(dir.path()) {
        StoreError::SeveralAdapters { folders, .. } => assert_eq!(folders, ["a", "b"]),
        other => panic!("{other}"),
    }
}

#[test]
fn a_config_that_is_no_text_or_no_file_is_refused() {
    let dir = folder(None);
    let config = dir.path().join("adapter_config.json");
    fs::write(&config, b"{\"r\": \xff}").unwrap();
    let open = || AdapterStore::open(dir.path()).unwrap_err();
    assert!(matches!(
        open(),
        StoreError::ConfigNotUtf8 { valid_up_to: 6, .. }
    ));
    fs::remove_file(&config).unwrap();
    fs::create_dir(&config).unwrap();
    assert!(matches!(open(), StoreError::Io { .. }));
    fs::remove_dir(&config).unwrap();
    fs::File::create(&config)
        .unwrap()
        .set_len(17 << 20)
        .unwrap();
    assert!(matches!(open(), StoreError::ConfigTooLarge { .. }));
}

#[test]
fn tensors_in_memory_are_checked_like_those_in_a_file() {
    let tensor = |name: &str, bytes: usize| {
        MemoryTensor::new(name, TensorDtype::F32, [2, 2], vec![0u8; bytes])
    };
    let open = |tensors: Vec<MemoryTensor>| AdapterStore::from_tensors("{}", tensors);
    assert!(matches!(
        open(vec![tensor("x", 15)]),
        Err(HeaderError::SizeMismatch {
            expected: 16,
            actual: 15,
            ..
        })
    ));
    assert!(matches!(
        open(vec![tensor("x", 16), tensor("x", 16)]),
        Err(HeaderError::DuplicateName { .. })
    ));
    let store = open(vec![tensor("x", 16), tensor("y", 16)]).unwrap();
    assert_eq!(store.tensors().len(), 2);
    assert_eq!(store.path(), None);
}

/// Headers of the pieces that the parser looks for, so that odd joints are hit.
fn odd_header() -> impl Strategy<Value = Vec<u8>> {
    let pieces = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"x\"",
        "\"y\"",
        "\"dtype\"",
        "\"shape\"",
        "\"data_offsets\"",
        "\"F32\"",
        "\"F4\"",
        "\"__metadata__\"",
        "0",
        "4",
        "-1",
        "18446744073709551615",
        "18446744073709551616",
        "1e9",
        "null",
        " ",
        "\\",
        "\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}",
        "\"y\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}",
    ]);
    prop::collection::vec(pieces, 0..14).prop_map(|pieces| pieces.concat().into_bytes())
}

proptest! {
    #[test]
    fn any_header_is_read_or_refused_without_a_panic(
        header in prop_oneof![prop::collection::vec(any::<u8>(), 0..200), odd_header()],
        data_bytes in prop_oneof![0u64..16, any::<u64>()],
    ) {
        if let Ok(entries) = parse_safetensors_header(&header, data_bytes) {
            let sum: u64 = entries.iter().map(|e| e.bytes.end - e.bytes.start).sum();
            prop_assert_eq!(sum, data_bytes);
        }
    }

    #[test]
    fn any_file_is_opened_or_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let dir = folder(Some(&bytes));
        let _ = AdapterStore::open(dir.path());
    }

    #[test]
    fn what_the_safetensors_crate_writes_is_read_back(
        shapes in prop::collection::vec(prop::collection::vec(0usize..5, 0..3), 0..6),
    ) {
        let data: Vec<Vec<u8>> = shapes
            .iter()
            .map(|shape| vec![7; shape.iter().product::<usize>() * 4])
            .collect();
        let views = shapes.iter().zip(&data).enumerate().map(|(i, (shape, data))| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data).unwrap();
            (format!("t{i}"), view)
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        let dir = folder(Some(&bytes));
        let store = AdapterStore::open(dir.path()).unwrap();
        prop_assert_eq!(store.tensors().len(), shapes.len());
        for (i, meta) in store.tensors().iter().enumerate() {
            let n: usize = meta.name[1..].parse().unwrap();
            prop_assert_eq!(&meta.shape, &shapes[n]);
            prop_assert_eq!(store.tensor_bytes(TensorId(i)), &data[n][..]);
        }
    }
}
