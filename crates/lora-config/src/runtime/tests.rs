use super::*;
use proptest::prelude::*;

const FULL: &str = r#"
    model = "m/config.json"
    backend = "cuda"
    max_loras = 4
    max_rank = 128
    modules = ["qkv_proj"]
    peer = "box:1"
    [experts]
    rank = 32
    budget = "1.5 GiB"
    [levers]
    no_apply = true
    gemv_max_m = 7
    [[adapters]]
    name = "a"
    path = "adapters/a"
    [[adapters]]
    name = "b"
    path = "/abs/b"
    pinned = false
"#;

fn problem(text: &str) -> String {
    RuntimeConfig::from_toml(text).unwrap_err().to_string()
}

#[test]
fn every_key_arrives() {
    let config = RuntimeConfig::from_toml(FULL).unwrap();
    assert_eq!(config.model.as_deref(), Some(Path::new("m/config.json")));
    assert_eq!(config.backend, BackendKind::Cuda);
    assert_eq!((config.max_loras, config.max_rank), (4, 128));
    assert_eq!(config.modules, ["qkv_proj"]);
    assert_eq!(config.expert_budget, Some(3 << 29));
    assert_eq!(config.levers.max_lora_expert_rank(), 32);
    assert_eq!(config.levers.lora_peer_env(), Some("box:1"));
    assert!(config.levers.lora_no_apply());
    assert_eq!(config.levers.lora_gemv_max_m(), 7);
    let pinned: Vec<bool> = config.adapters.iter().map(|a| a.pinned).collect();
    assert_eq!(pinned, [true, false]);
}

#[test]
fn an_empty_file_is_the_defaults() {
    let config = RuntimeConfig::from_toml("").unwrap();
    assert_eq!(config.backend, BackendKind::Host);
    assert_eq!((config.max_loras, config.max_rank), (8, 64));
    assert_eq!(config.expert_budget, None);
    assert!(config.adapters.is_empty() && config.modules.is_empty());
    assert_eq!(config.levers, Levers::default());
}

#[test]
fn unknown_keys_are_errors_at_every_level() {
    for text in [
        "max_lora = 1",
        "[experts]\nranks = 1",
        "[levers]\nno_aply = true",
        "[levers]\npeer = \"x\"",
        "[levers]\nexpert_rank = 1",
        "[[adapters]]\nname = \"a\"\npath = \"p\"\npin = true",
    ] {
        assert!(problem(text).contains("unknown field"), "{text}");
    }
    assert!(problem("max_rank = 1\n\nmax_lora = 1").starts_with("lora.toml, line 3: "));
}

#[test]
fn values_that_cannot_be_are_errors() {
    for text in [
        "max_rank = 0",
        "max_rank = -1",
        "max_loras = 99999999999",
        "max_loras = 1.5",
        "backend = \"tpu\"",
        "[experts]\nrank = 0",
        "[experts]\nbudget = \"much\"",
        "[experts]\nbudget = -1",
        "[levers]\nrotate = 1",
        "[[adapters]]\nname = \"a\"",
        "not toml",
    ] {
        let problem = problem(text);
        assert!(problem.starts_with("lora.toml, line "), "{text}: {problem}");
        assert!(!problem.contains('\n'), "{problem}");
    }
}

#[test]
fn adapters_need_distinct_names_and_a_slot_each() {
    let entry = |name: &str| format!("[[adapters]]\nname = \"{name}\"\npath = \"p\"\n");
    assert!(problem(&entry("")).contains("adapters[0].name is empty"));
    let twice = entry("a") + &entry("b") + &entry("a");
    assert!(problem(&twice).contains("adapters[2].name is \"a\""));
    let three = format!("max_loras = 2\n{}", entry("a") + &entry("b") + &entry("c"));
    assert!(problem(&three).contains("3 entries, and max_loras is 2"));
}

#[test]
fn code_beats_environment_beats_file() {
    let file = RuntimeSettings::from_toml(FULL).unwrap();
    let environment = RuntimeSettings {
        levers: LeverSettings {
            gemv_max_m: Some(1),
            peer: Some("env:2".to_owned()),
            ..LeverSettings::default()
        },
        ..RuntimeSettings::default()
    };
    let code = RuntimeSettings {
        max_rank: NonZeroU32::new(16),
        levers: LeverSettings {
            gemv_max_m: Some(0),
            ..LeverSettings::default()
        },
        ..RuntimeSettings::default()
    };
    let config = RuntimeConfig::from_layers([code, environment, file]).unwrap();
    assert_eq!(config.levers.lora_gemv_max_m(), 0);
    assert_eq!(config.levers.lora_peer_env(), Some("env:2"));
    assert_eq!((config.max_rank, config.max_loras), (16, 4));
    assert!(config.levers.lora_no_apply());
}

#[test]
fn every_setting_of_a_stronger_layer_wins_and_of_a_weaker_one_fills_in() {
    let full = RuntimeSettings::from_toml(FULL).unwrap();
    let other = RuntimeSettings::from_toml(
        r#"
        model = "n"
        backend = "host"
        max_loras = 5
        max_rank = 6
        modules = []
        adapters = []
        [experts]
        budget = 7
        "#,
    )
    .unwrap();
    let without_levers = RuntimeSettings {
        levers: LeverSettings::default(),
        ..full.clone()
    };
    assert_eq!(without_levers.clone().over(other.clone()), without_levers);
    assert_eq!(other.clone().over(without_levers), other);
    assert_eq!(RuntimeSettings::default().over(full.clone()), full);
}

#[test]
fn relative_paths_are_taken_from_the_files_folder() {
    let settings = RuntimeSettings::from_toml(FULL)
        .unwrap()
        .relative_to(Path::new("/srv"));
    assert_eq!(settings.model, Some(PathBuf::from("/srv/m/config.json")));
    let paths: Vec<_> = settings
        .adapters
        .unwrap()
        .into_iter()
        .map(|a| a.path)
        .collect();
    assert_eq!(paths, [Path::new("/srv/adapters/a"), Path::new("/abs/b")]);
}

#[test]
fn the_example_file_parses() {
    let text = include_str!("../../../../docs/lora.toml");
    let config = RuntimeConfig::from_toml(text).unwrap();
    assert!(!config.adapters.is_empty() && config.model.is_some());
}

proptest! {
    #[test]
    fn no_text_panics(text in any::<String>()) {
        let _ = RuntimeConfig::from_toml(&text);
    }

    #[test]
    fn no_toml_like_text_panics(
        lines in proptest::collection::vec(
            "(max_rank|experts|levers|\\[\\[adapters\\]\\]|\\[experts\\]|budget|name|é) ?=? ?(-?[0-9]{1,20}|\"[a-zé0-9 .]{0,9}\"|true|\\[|\\{)?",
            0..8,
        )
    ) {
        let _ = RuntimeConfig::from_toml(&lines.join("\n"));
    }
}
