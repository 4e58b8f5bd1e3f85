//! The `lora` executable itself, against a peer on loopback.

#[path = "../../../tests/src/faulty.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the tests of all crates use the whole of it"
)]
mod faulty;
#[path = "../../../tests/src/peer.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "the tests of all crates use the whole of it"
)]
mod peer;

use faulty::{Fault, FaultyPeer};
use peer::Peer;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn cases() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/cases")
}

fn audit(url: &str, more: &[&str]) -> Output {
    let model = cases().join("llama_plain/config.json");
    Command::new(env!("CARGO_BIN_EXE_lora"))
        .args(["audit", url, "--model"])
        .arg(model)
        .args(more)
        .output()
        .expect("the executable runs")
}

#[test]
fn the_executable_audits_a_url_and_shows_no_bar_where_nobody_watches() {
    let peer = Peer::serving(&cases());
    for (more, warned) in [(&[][..], true), (&["--fetch"][..], false)] {
        let output = audit(&peer.url("llama_plain/adapter"), more);
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert_eq!(text.contains("WARN[values-unread]"), warned, "{text}");
        assert!(text.contains("applied 28 of 28 tensors"), "{text}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

#[test]
fn the_executable_exits_with_one_where_a_peer_dies_midway() {
    let peer = FaultyPeer::serving(&cases(), Fault::Dies);
    let url = peer.url("llama_plain/adapter");
    let output = audit(&url, &["--fetch", "--timeout", "2"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("REJECT[source-failed]") && text.contains(&url),
        "{text}"
    );
}
