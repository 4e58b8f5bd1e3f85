//! The corpus of the fuzz targets in `fuzz/`, replayed: every input that once found something, and those that together reach what
//! fuzzing has reached.

use lora_tests::data_dir;
use lora_tests::hostile::{self, Seed};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// What a body may take beside its input, bytes: a small model's pool image, a report, tables of a parser.
const FIXED_BYTES: usize = 4 << 20;

/// What a body may take for each byte of its input.
const BYTES_A_BYTE: usize = 64;

/// Every input of every target: the corpora, and the recorded cases that fuzzing started from.
fn inputs() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut inputs = Vec::new();
    for (target, _) in hostile::TARGETS {
        let path = data_dir().join(format!("hostile/{target}.corpus"));
        let file = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let corpus = hostile::unpack_corpus(&file).expect("a whole corpus");
        let named = |(at, bytes): (usize, &[u8])| (target, format!("{at}"), bytes.to_vec());
        inputs.extend(corpus.into_iter().enumerate().map(named));
    }
    let cases = std::fs::read_dir(data_dir().join("cases")).expect("cases are there");
    for case in cases {
        let case = case.expect("a folder that lists").path();
        let named = |seed: Seed| (seed.target, case.display().to_string(), seed.bytes);
        inputs.extend(hostile::seeds_of(&case).into_iter().map(named));
    }
    inputs
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn no_input_panics_or_takes_more_memory_than_a_multiple_of_its_size() {
    let inputs = inputs();
    for (target, body) in hostile::TARGETS {
        let of_target = || inputs.iter().filter(|(of, ..)| *of == target);
        assert_ne!(of_target().count(), 0, "no input for {target}");
        // What is made once: models, thread pools.
        body(&[0; 64]);
        for (_, name, bytes) in of_target() {
            println!("{target} {name}");
            let before = MEMORY.current_usage();
            MEMORY.reset_peak_usage();
            body(bytes);
            let taken = MEMORY.peak_usage().saturating_sub(before);
            let most = FIXED_BYTES + BYTES_A_BYTE * bytes.len();
            assert!(
                taken <= most,
                "{target} {name}: {taken} bytes for an input of {}, {most} at most",
                bytes.len()
            );
        }
    }
}

#[test]
fn fuzz_targets_are_those_that_are_replayed() {
    let manifest = include_str!("../../../fuzz/Cargo.toml");
    for (target, _) in hostile::TARGETS {
        let bin = format!("[[bin]]\nname = \"{target}\"\npath = \"fuzz_targets/{target}.rs\"\n");
        assert!(manifest.contains(&bin), "fuzz/Cargo.toml lacks {target}");
    }
    assert_eq!(manifest.matches("[[bin]]").count(), hostile::TARGETS.len());
}
