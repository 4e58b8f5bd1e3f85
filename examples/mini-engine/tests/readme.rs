//! The program prints what its README shows.

use std::process::Command;

#[test]
fn the_demonstration_prints_what_the_readme_shows() {
    let run = Command::new(env!("CARGO_BIN_EXE_mini-engine"))
        .output()
        .expect("the program runs");
    let printed = String::from_utf8(run.stdout).expect("is text");
    assert!(
        run.status.success(),
        "{printed}{}",
        String::from_utf8_lossy(&run.stderr)
    );
    let readme = include_str!("../README.md");
    let (_, shown) = readme.split_once("```text\n1. ").expect("shows the output");
    let (shown, _) = shown.split_once("```").expect("the block ends");
    // The last column is left out: its last digit is the platform's own exponential function.
    let without_error = |line: &str| line.rsplit_once("| ").map(|(line, _)| line.to_owned());
    let printed: Vec<&str> = printed.lines().collect();
    let mut compared = 0;
    for line in shown
        .lines()
        .filter(|line| line.contains("step") || line.starts_with('|'))
    {
        let wanted = without_error(line).unwrap_or_else(|| line.to_owned());
        assert!(
            printed.iter().any(|printed| printed.starts_with(&wanted)),
            "{wanted}"
        );
        compared += 1;
    }
    assert!(compared >= 8, "{compared} lines");
}
