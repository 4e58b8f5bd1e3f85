use super::*;

fn read(variables: &[(&str, &str)]) -> Result<(LeverSettings, Vec<ConfigFinding>), ConfigError> {
    LeverSettings::from_lookup("T_", |asked| {
        variables
            .iter()
            .find_map(|(name, value)| (asked == format!("T_{name}")).then(|| value.into()))
    })
}

fn levers(variables: &[(&str, &str)]) -> Levers {
    Levers::from_layers([read(variables).unwrap().0])
}

#[test]
fn defaults_hold_where_nothing_is_set() {
    let levers = levers(&[]);
    assert_eq!(levers, Levers::default());
    assert_eq!(
        (levers.lora_gemv_max_m(), levers.max_lora_expert_rank()),
        (48, 16)
    );
    assert_eq!(levers.lora_peer_env(), None);
    assert!(!levers.lora_rotate_env());
}

#[test]
fn each_flag_is_read_from_its_own_variable() {
    type Accessor = fn(&Levers) -> bool;
    let flags: [(&str, Accessor); 8] = [
        ("NO_APPLY", Levers::lora_no_apply),
        ("NO_FFN", Levers::lora_no_ffn),
        ("ALLOW_PARTIAL", Levers::allow_partial_targets),
        ("EXPERTS", Levers::lora_experts_env),
        ("EAGER", Levers::lora_eager_env),
        ("ROTATE", Levers::lora_rotate_env),
        ("NO_BATCH_VERIFY", Levers::no_batch_verify),
        ("PREFILL_BGMV", Levers::prefill_bgmv_forced),
    ];
    for (name, _) in flags {
        let set = levers(&[(name, "1")]);
        for (other, accessor) in flags {
            assert_eq!(accessor(&set), other == name, "{name} set, {other} read");
        }
    }
}

#[test]
fn booleans_in_every_spelling() {
    for (value, on) in [
        ("1", true),
        ("true", true),
        ("TRUE", true),
        ("True", true),
        ("0", false),
        ("false", false),
        ("FALSE", false),
        ("", false),
    ] {
        assert_eq!(
            levers(&[("EAGER", value)]).lora_eager_env(),
            on,
            "{value:?}"
        );
    }
}

#[test]
fn any_other_boolean_is_an_error_that_names_the_variable() {
    for value in ["yes", "on", "2", "-1", "truee"] {
        let error = read(&[("NO_FFN", value)]).unwrap_err();
        assert!(
            matches!(&error, ConfigError::Environment { variable, value: v, .. } if variable == "T_NO_FFN" && v == value),
            "{error}"
        );
    }
}

#[test]
fn a_number_that_cannot_be_read_falls_back_with_a_warning() {
    for (name, value) in [
        ("GEMV_MAX_M", "many"),
        ("GEMV_MAX_M", "-1"),
        ("GEMV_MAX_M", ""),
        ("EXPERT_RANK", "0"),
        ("EXPERT_RANK", "1.5"),
        ("EXPERT_RANK", "99999999999"),
    ] {
        let (settings, warnings) = read(&[(name, value)]).unwrap();
        assert_eq!(settings, LeverSettings::default());
        assert!(warnings[0].message.contains(&format!("T_{name}")));
    }
    let set = levers(&[("GEMV_MAX_M", "0"), ("EXPERT_RANK", " 32 ")]);
    assert_eq!((set.lora_gemv_max_m(), set.max_lora_expert_rank()), (0, 32));
}

#[test]
fn a_peer_permits_rotation_and_an_empty_one_is_none() {
    let with_peer = levers(&[("PEER", "host:8000")]);
    assert_eq!(with_peer.lora_peer_env(), Some("host:8000"));
    assert!(with_peer.lora_rotate_env());
    let empty = levers(&[("PEER", "")]);
    assert!(empty.lora_peer_env().is_none() && !empty.lora_rotate_env());
    let by_code = Levers::from_layers([LeverSettings {
        peer: Some(String::new()),
        ..LeverSettings::default()
    }]);
    assert!(by_code.lora_peer_env().is_none() && !by_code.lora_rotate_env());
}

#[test]
fn the_strongest_layer_that_sets_a_lever_wins() {
    let layer = |rows: Option<u32>, eager: Option<bool>| LeverSettings {
        gemv_max_m: rows,
        eager,
        ..LeverSettings::default()
    };
    let levers = Levers::from_layers([
        layer(None, Some(false)),
        layer(Some(8), Some(true)),
        layer(Some(9), None),
    ]);
    assert_eq!(levers.lora_gemv_max_m(), 8);
    assert!(!levers.lora_eager_env());
}

#[test]
fn every_lever_of_a_stronger_layer_wins_and_of_a_weaker_one_fills_in() {
    let all = |on: bool, number: u32| LeverSettings {
        no_apply: Some(on),
        no_ffn: Some(on),
        gemv_max_m: Some(number),
        allow_partial: Some(on),
        experts: Some(on),
        expert_rank: NonZeroU32::new(number),
        eager: Some(on),
        rotate: Some(on),
        peer: Some(number.to_string()),
        no_batch_verify: Some(on),
        prefill_bgmv: Some(on),
    };
    let (strong, weak) = (all(true, 1), all(false, 2));
    assert_eq!(strong.clone().over(weak.clone()), strong);
    assert_eq!(LeverSettings::default().over(weak.clone()), weak);
}

#[cfg(unix)]
#[test]
fn a_peer_that_is_no_text_is_an_error() {
    use std::os::unix::ffi::OsStringExt;
    let lookup = |asked: &str| (asked == "T_PEER").then(|| OsString::from_vec(vec![0xff]));
    assert!(matches!(
        LeverSettings::from_lookup("T_", lookup),
        Err(ConfigError::Environment { .. })
    ));
}
