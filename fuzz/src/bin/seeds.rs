//! `seeds DATA OUT` writes what fuzzing starts from into `OUT/<target>/`: the recorded cases and the corpora of the tests' data. `seeds --pack DIR
//! FILE` makes a corpus of the inputs in a folder.

use lora_fuzz::{Seed, TARGETS, pack_corpus, seeds_of, unpack_corpus};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

fn main() -> io::Result<()> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    match arguments.as_slice() {
        [flag, dir, file] if flag.as_os_str() == "--pack" => pack(dir, file),
        [data, out] => unpack(data, out),
        _ => Err(io::Error::other("seeds DATA OUT, or seeds --pack DIR FILE")),
    }
}

fn unpack(data: &Path, out: &Path) -> io::Result<()> {
    let mut written = 0;
    let mut write = |target: &str, name: &str, bytes: &[u8]| {
        let dir = out.join(target);
        fs::create_dir_all(&dir)?;
        written += 1;
        fs::write(dir.join(name), bytes)
    };
    for case in fs::read_dir(data.join("cases"))? {
        let case = case?;
        let name = case.file_name().to_string_lossy().into_owned();
        for seed in seeds_of(&case.path()) {
            let Seed {
                target,
                label,
                bytes,
            } = seed;
            write(target, &format!("{name}{label}"), &bytes)?;
        }
    }
    for (target, _) in TARGETS {
        let file = fs::read(data.join("hostile").join(format!("{target}.corpus")))?;
        let inputs = unpack_corpus(&file).ok_or_else(|| io::Error::other("a corpus was cut"))?;
        for (at, input) in inputs.into_iter().enumerate() {
            write(target, &format!("corpus-{at}"), input)?;
        }
    }
    println!("{written} seeds in {}", out.display());
    Ok(())
}

fn pack(dir: &Path, file: &Path) -> io::Result<()> {
    let mut inputs = Vec::new();
    for input in fs::read_dir(dir)? {
        inputs.push(fs::read(input?.path())?);
    }
    inputs.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
    fs::write(file, pack_corpus(inputs.iter().map(Vec::as_slice)))
}
